"""What units look like: features of clients and of the merge on images."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedmerge.architecture.from_code import evaluating
from fedmerge.architecture.model_code import ModelCode
from fedmerge.architecture.tensor_names import load_checkpoint, model_names
from fedmerge.checkpoint import Checkpoint, from_state_dict, read_npy
from fedmerge.errors import ArchitectureError, CheckpointError, TrainingError, UsageError
from fedmerge.federated.work_dir import MOST_CLIENTS
from fedmerge.merging.methods import average_to_beat
from fedmerge.merging.options import NO_LEAD
from fedmerge.merging.result import Merge
from fedmerge.report import CellPicture, FeatureMaps, UnitRow
from fedmerge.report.plan_figure import CONVOLUTION, is_convolution
from fedmerge.training import Preparation
from fedmerge.training.data_formats import open_columns
from fedmerge.user_code import own_code, parameters_of, run_model
from fedmerge.values.arrays import Array, IntArray
from fedmerge.values.option_fields import check_options, whole
from fedmerge.values.plans import Plan, Widths, axis_size, unit_positions

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
SAMPLES = ("x", "x_test", "x_train")  # arrays of a shard or data set, the first found wins
COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}  # channels → Pillow's mode


@dataclass(frozen=True)
class ImageOptions:
    """Which image, how it reaches the model, and which groups look at it."""

    file: Path
    index: int = 0  # of the sample, in files that hold several
    preparation: Preparation = field(default_factory=Preparation)
    groups: tuple[str, ...] = ()  # none: the first and the last convolutional one
    is_optional: bool = False  # nobody asked for it: where it can't be seen, the page says why

    def __post_init__(self) -> None:
        check_options(self, {"index": (whole(0), "a whole number from 0")})
        object.__setattr__(self, "file", Path(self.file))

    @property
    def label(self) -> str:
        """What the image is called."""
        is_one = self.file.suffix.lower() in PICTURES
        return self.file.name if is_one else f"{self.file.name}, sample {self.index}"


def read_image(options: ImageOptions, channels: int, size: tuple[int, ...]) -> Array:
    """Return the image (1, channels, height, width) as a model takes it.

    A picture's file is brought to the model's colours, and to `size` (height, width) if given.
    """
    suffix = options.file.suffix.lower()
    check_image(options)
    if suffix in PICTURES:
        return _picture(options, channels, size)
    sample = _array(options.file) if suffix == ".npy" else _sample(options.file, options.index)
    options.preparation.check(sample, options.file.name)
    image = options.preparation(sample)
    image = image[:, None] if image.ndim == 3 else image
    if image.ndim != 4 or image.shape[1] != channels:
        raise UsageError(
            f"`image={options.file.name}`: is {image.shape[1:]}, expected {channels} channels, "
            "height and width"
        )
    return image


def check_image(options: ImageOptions) -> None:
    """Refuse an image that is not there."""
    if not options.file.is_file():
        raise UsageError(f"`image={options.file}`: no such file")


def _picture(options: ImageOptions, channels: int, size: tuple[int, ...]) -> Array:
    from PIL import Image  # it comes with matplotlib

    if channels not in COLOURS:
        raise UsageError(
            f"`image={options.file.name}`: the model takes {channels} channels, expected 1, 3 or 4",
            "give the image as .npy",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow's about pictures that fill memory
            with Image.open(options.file) as opened:
                picture = opened.convert(COLOURS[channels])
    except Exception as error:  # damaged pictures make its decoders raise nearly anything
        raise UsageError(f"`image={options.file.name}`: cannot be read ({error})") from None
    if size:
        picture = picture.resize((size[1], size[0]))
    pixels = np.asarray(picture)
    pixels = pixels[None, None] if channels == 1 else np.moveaxis(pixels, -1, 0)[None]
    plain = Preparation((0.0,), (1.0,))
    return (options.preparation if options.preparation.mean else plain)(pixels)


def _array(path: Path) -> Array:
    """Return the array of an .npy file as one sample: (1, …)."""
    try:
        array = read_npy(path)
    except CheckpointError as error:
        raise UsageError(f"`image` {error.problem}") from None
    if array.ndim == 2:
        return array[None] if array.dtype == np.uint8 else array[None, None]
    return array if array.ndim == 4 else array[None]


def _sample(path: Path, index: int) -> Array:
    try:
        columns = open_columns(path)
    except TrainingError as error:
        raise UsageError(
            f"`image` {error.problem}", f"pictures ({', '.join(PICTURES)}), .npy or a shard"
        ) from None
    name = next((name for name in SAMPLES if name in columns), None)
    if name is None:
        found = ", ".join(columns) or "nothing"
        raise UsageError(f"`image={path.name}`: expected an array x, found {found}")
    samples = columns[name]()
    if not 0 <= index < len(samples):
        raise UsageError(f"`image_index` is {index}, {path.name} has {len(samples)} samples")
    return np.asarray(samples[index : index + 1])


SHOWN_UNITS = 4  # of a group
VISIBLE = (1, 3)  # input channels of filters that can be shown: grey, colours
UNSHARED = "No two clients share a unit of this group: each of its units is one client's own."
NEGATIVE = (
    "A client's unit that shows the negative of the merged one has the other sign: with odd "
    "activations such as tanh it may still do the same in its net."
)
OPPOSITE = -0.9  # correlation of two pictures of which one is the other's negative
GLOBAL, AVERAGE = "merged", "average"


@dataclass(frozen=True)
class Layer:
    """A convolution, by its weight, that makes the units of a group alone."""

    group: str
    weight: str


@dataclass(frozen=True)
class Look:
    """What one model makes of the image: maps and weights of the layers, by group."""

    maps: Mapping[str, Array]  # (channels, height, width)
    weights: Mapping[str, Array]  # (channels, inputs, height, width)


@dataclass(frozen=True)
class Seen:
    """One model's column: where each global unit is in it."""

    name: str
    look: Look
    places: Mapping[str, Mapping[int, int]]  # group → global unit → channel

    def picture(self, group: str, unit: int, *, is_filter: bool) -> CellPicture:
        """Return what one global unit sees, or the filter that it sees with."""
        channel = self.places[group].get(unit)
        if channel is None:
            return CellPicture(None, "not its unit")
        source = self.look.weights if is_filter else self.look.maps
        values = source[group][channel]
        what = "filter" if is_filter else "feature map"
        return CellPicture(
            _scaled(_as_pixels(values) if is_filter else values),
            f"{what} of {self.name}, unit {channel}",
        )


def feature_maps(
    merged: Checkpoint,
    merge: Merge,
    code: ModelCode,
    options: ImageOptions,
) -> tuple[FeatureMaps, ...]:
    """Return the maps of the chosen groups; one model is in memory at a time."""
    session = merge.session
    layers = chosen_layers(session.plan, options.groups)
    image = image_for(session.plan, session.client_widths[0], code, options)
    columns = list(merge_columns(merged, merge, code, layers, image))
    picture = picture_of(image, options)
    how = f"{of_the_leader(merge.options.lead)} {of_the_first(len(session.clients))}".strip()
    return tuple(
        maps_of(layer, columns, _owner_counts(merge, layer.group), picture, how=how)
        for layer in layers
    )


def image_for(plan: Plan, widths: Widths, code: ModelCode, options: ImageOptions) -> Array:
    """Return the image (1, channels, height, width) as the first convolution takes it."""
    first = plan.tensors[conv_layers(plan)[0].weight]
    size = code.input_shapes[0][-2:] if code.input_shapes else ()
    return read_image(options, axis_size(first.axes[1], widths), size)


def picture_of(image: Array, options: ImageOptions) -> CellPicture:
    """Return the image as the page shows it."""
    return CellPicture(_scaled(_as_pixels(image[0])), options.label)


def _owner_counts(merge: Merge, group: str) -> IntArray:
    """Return how many clients own each global unit (units,)."""
    homes = [placement[group].indices for placement in merge.placements]
    return np.bincount(np.concatenate(homes), minlength=merge.widths[group])


def conv_layers(plan: Plan) -> list[Layer]:
    """Return the first convolution that makes each group, in the plan's order."""
    found: dict[str, Layer] = {}
    for name, tensor in plan.tensors.items():
        if is_convolution(tensor):
            (group,) = tensor.produces
            found.setdefault(group, Layer(group, name))
    layers = [found[group.name] for group in plan.groups if group.name in found]
    if not layers:
        raise UsageError(
            "`image`: the net has no convolution whose units are matched",
            "feature maps are of convolutional nets; leave `image` out",
        )
    return layers


def chosen_layers(plan: Plan, groups: Sequence[str]) -> list[Layer]:
    """Return the layers of the named groups, by default the first and the last one's."""
    layers = conv_layers(plan)
    if not groups:
        return layers if len(layers) < 3 else [layers[0], layers[-1]]
    known = {layer.group: layer for layer in layers}
    for group in groups:
        if group not in known:
            raise UsageError(
                f"`image_group` is '{group}', which no convolution makes",
                f"there are {', '.join(known)}",
            )
    return [known[group] for group in groups]


def merge_columns(
    merged: Checkpoint,
    merge: Merge,
    code: ModelCode,
    layers: Sequence[Layer],
    image: Array,
) -> Iterator[Seen]:
    """Yield the merge, the first clients and the average, as far as clients are equally wide."""
    names = model_names(merge.clients[0], code.build())
    groups = [layer.group for layer in layers]

    def look(checkpoint: Checkpoint) -> Look:
        return _look(load_checkpoint(code.build, checkpoint), names, layers, image)

    yield Seen(GLOBAL, look(merged), {g: _channels(merge, layers, g) for g in groups})
    for number, client in enumerate(merge.clients[:MOST_CLIENTS]):
        own = {g: _channels(merge, layers, g, number) for g in groups}
        yield Seen(client.name, look(client), own)
    try:
        plain = average_to_beat(merge.session)
    except ArchitectureError:
        return  # of different widths: there is no average
    owners = {g: _first_owners(merge, layers, g) for g in groups}
    yield Seen(AVERAGE, look(from_state_dict(plain.state_dict(), name=AVERAGE)), owners)


def _channels(
    merge: Merge, layers: Sequence[Layer], group: str, client: int | None = None
) -> dict[int, int]:
    """Return global unit → channel in a client, or in the merge itself."""
    weight = next(layer.weight for layer in layers if layer.group == group)
    layout = merge.plan.tensors[weight].axes[0]
    if client is None:
        positions = unit_positions(layout, group, merge.widths)[:, 0].tolist()
        return dict(enumerate(positions))
    positions = unit_positions(layout, group, merge.session.client_widths[client])[:, 0].tolist()
    units = merge.placements[client][group].indices.tolist()
    return dict(zip(units, positions, strict=True))


def _first_owners(merge: Merge, layers: Sequence[Layer], group: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for client in range(len(merge.clients)):
        found = {**_channels(merge, layers, group, client), **found}
    return found


def _look(
    model: nn.Module, names: Mapping[str, str], layers: Sequence[Layer], image: Array
) -> Look:
    """Run a model on the image, and keep what the layers put out."""
    maps: dict[str, Array] = {}
    weights: dict[str, Array] = {}
    hooks = []
    for layer in layers:
        module = model.get_submodule(names[layer.weight].rpartition(".")[0])
        weights[layer.group] = model.get_parameter(names[layer.weight]).detach().float().numpy()

        def keep(_: nn.Module, __: object, output: object, group: str = layer.group) -> None:
            with own_code():
                if isinstance(output, torch.Tensor) and output.dim() == CONVOLUTION:
                    maps.setdefault(group, output[0].detach().float().numpy().copy())

        hooks.append(module.register_forward_hook(keep))
    try:
        run_on(model, image)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        if layer.group not in maps:
            raise ArchitectureError(f"'{layer.weight}' put out no feature map of the image")
    return Look(maps, weights)


def run_on(model: nn.Module, image: Array) -> None:
    """Run a model on the image, for what its hooks see."""
    precision = next(iter(parameters_of(model).values())).dtype
    given = torch.from_numpy(np.ascontiguousarray(image)).to(precision)
    hint = "give a picture of the size that the model takes, or `input_shape`"
    with torch.no_grad():
        run_model(evaluating(model), [given], hint=hint)


def maps_of(
    layer: Layer, columns: Sequence[Seen], owners: IntArray, image: CellPicture, *, how: str = ""
) -> FeatureMaps:
    """Return the pictures of a group whose global units have so many owners (units,)."""
    group = layer.group
    has_filters = columns[0].look.weights[group].shape[1] in VISIBLE
    rows = []
    for unit in shown_units(owners, group, columns[0]):
        maps = tuple(column.picture(group, unit, is_filter=False) for column in columns)
        filters = tuple(column.picture(group, unit, is_filter=True) for column in columns)
        rows.append(UnitRow(unit, maps, filters if has_filters else ()))
    names = tuple(column.name for column in columns)
    if owners.max() < 2:
        how = f"{UNSHARED} {how}".strip()
    if _has_negative(columns, rows):
        how = f"{how} {NEGATIVE}".strip()
    return FeatureMaps(group, layer.weight, image, names, tuple(rows), how)


def _has_negative(columns: Sequence[Seen], rows: Sequence[UnitRow]) -> bool:
    """Return whether a client's map is the negative of the merged one."""
    for row in rows:
        merged, *others = (picture.pixels for picture in row.maps)
        for column, pixels in zip(columns[1:], others, strict=True):
            if column.name != AVERAGE and _correlation(merged, pixels) < OPPOSITE:
                return True
    return False


def _correlation(one: Array | None, other: Array | None) -> float:
    if one is None or other is None or one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def of_the_leader(lead: str | None) -> str:
    """Say why merged units look like one client's, where it leads.

    >>> of_the_leader("a"), of_the_leader("none")
    ('Client a leads: shared units are taken from it.', '')
    """
    is_led = lead not in (None, NO_LEAD)
    return f"Client {lead} leads: shared units are taken from it." if is_led else ""


def of_the_first(clients: int) -> str:
    """Say that not all clients are shown, where they are too many.

    >>> of_the_first(6), of_the_first(40)
    ('', 'The first 6 of 40 clients are shown.')
    """
    if clients <= MOST_CLIENTS:
        return ""
    return f"The first {MOST_CLIENTS} of {clients} clients are shown."


def shown_units(owners: IntArray, group: str, seen: Seen) -> list[int]:
    """Return the units with the most owners and, of these, the strongest answers, in order."""
    spread = seen.look.maps[group].std(axis=(1, 2))
    channels = seen.places[group]
    ranked = sorted(channels, key=lambda unit: (-owners[unit], -spread[channels[unit]], unit))
    return sorted(ranked[:SHOWN_UNITS])


def _as_pixels(values: Array) -> Array:
    """Return (channels, height, width) as (height, width) or (height, width, 3)."""
    return np.moveaxis(values[:3], 0, -1) if len(values) >= 3 else values[0]


def _scaled(values: Array) -> Array:
    """Return a picture's numbers from 0, the smallest, to 1, the largest."""
    low, high = float(values.min()), float(values.max())
    return (values - low) / (high - low) if high > low else np.full_like(values, 0.5)
