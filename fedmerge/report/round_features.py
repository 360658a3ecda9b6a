"""What matched units see after rounds: each client's layer as it was when it was matched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from fedmerge.architecture.model_code import ModelCode
from fedmerge.architecture.tensor_names import load_checkpoint, model_names
from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.federated.federation import placed_array
from fedmerge.federated.work_dir import MOST_CLIENTS, MatchedLayer, load_layer
from fedmerge.merging.merge_record import MergeRecord
from fedmerge.report import FeatureMaps
from fedmerge.report.unit_features import (
    AVERAGE,
    GLOBAL,
    ImageOptions,
    Layer,
    Look,
    Seen,
    chosen_layers,
    image_for,
    maps_of,
    of_the_first,
    picture_of,
    run_on,
)
from fedmerge.user_code import own_code, user_code
from fedmerge.values.arrays import Array, IntArray
from fedmerge.values.plans import Assignment, unit_positions
from fedmerge.values.work import Arrays

AS_MATCHED = (
    "The clients' layers are those that the last pass matched, on what the merged layers before "
    "them put out."
)
GONE = "of this run no client's layers were kept in {}"


@dataclass(frozen=True)
class _Site:
    """A convolution of the global model, with what it reads and makes of the image."""

    layer: Layer
    module: nn.Module
    names: Mapping[str, str]  # the plan's names of its parameters → the module's
    read: torch.Tensor  # (1, inputs, height, width)
    made: Array  # (channels, height, width)

    def look(self, arrays: Arrays | None = None) -> Look:
        """Return what the layer shows, with other tensors (in the global layout) if given."""
        parameters = {name: p.detach() for name, p in self.module.named_parameters()}
        made = self.made
        if arrays is not None:
            parameters |= {
                own: torch.from_numpy(arrays[name]).to(self.read.dtype)
                for name, own in self.names.items()
            }
            with torch.no_grad(), user_code(f"'{self.layer.weight}' does not run by itself"):
                run = functional_call(self.module, parameters, (self.read,))
            made = run[0].float().numpy()
        weight = parameters[self.names[self.layer.weight]].float().numpy()
        return Look({self.layer.group: made}, {self.layer.group: weight})


def round_features(
    merged: Checkpoint, record: MergeRecord, folder: Path, code: ModelCode, options: ImageOptions
) -> tuple[FeatureMaps, ...]:
    """Return the maps of a model that was made in rounds, of whose clients a folder tells."""
    owned = {entry.name: entry.width - entry.padding for entry in record.groups}
    found = [
        (layer, kept)
        for layer in chosen_layers(record.plan, options.groups)
        if (kept := load_layer(folder, record.plan, layer.group, owned)) is not None
        and layer.weight in next(iter(kept.clients.values()))
    ]
    if not found:
        raise UsageError(
            f"`image`: {GONE.format(folder)}",
            "give the `work_dir` of the run; only `method=fedma` matches layers",
        )
    widths = _widths(record)
    image = image_for(record.plan, widths, code, options)
    sites = layer_sites(
        load_checkpoint(code.build, merged), merged, [own for own, _ in found], image
    )
    return tuple(
        maps_of(
            site.layer,
            list(layer_columns(site, kept, record)),
            _owner_counts(record, site.layer.group),
            picture_of(image, options),
            how=f"{AS_MATCHED} {of_the_first(len(record.sources))}".strip(),
        )
        for site, (_, kept) in zip(sites, found, strict=True)
    )


def layer_sites(
    model: nn.Module, merged: Checkpoint, layers: Sequence[Layer], image: Array
) -> list[_Site]:
    """Run the global model on the image, and return what its layers read and make."""
    names = model_names(merged, model)
    places = {layer: names[layer.weight].rpartition(".")[0] for layer in layers}
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = []
    for place in places.values():

        def keep(_: nn.Module, read: tuple[torch.Tensor], made: object, key: str = place) -> None:
            with own_code():
                if isinstance(made, torch.Tensor) and made.dim() == image.ndim:
                    seen.setdefault(key, (read[0].detach().clone(), made.detach().clone()))

        hooks.append(model.get_submodule(place).register_forward_hook(keep))
    try:
        run_on(model, image)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, place in places.items():
        if place not in seen:
            raise ArchitectureError(f"'{layer.weight}' put out no feature map of the image")
    return [
        _Site(
            layer,
            model.get_submodule(place),
            {own: of.rpartition(".")[2] for own, of in names.items() if _is_in(of, place)},
            seen[place][0],
            seen[place][1][0].float().numpy(),
        )
        for layer, place in places.items()
    ]


def _is_in(name: str, place: str) -> bool:
    return name.rpartition(".")[0] == place


def layer_columns(site: _Site, kept: MatchedLayer, record: MergeRecord) -> Iterator[Seen]:
    """Yield the global layer, each client's and their average's, all in the global layout."""
    group = site.layer.group
    layout = record.plan.tensors[site.layer.weight].axes[0]
    channels: list[int] = unit_positions(layout, group, _widths(record))[:, 0].tolist()
    yield Seen(GLOBAL, site.look(), {group: dict(enumerate(channels))})
    first_owners: dict[int, int] = {}
    for name, arrays in islice(kept.clients.items(), MOST_CLIENTS):
        units = _checked_units(kept, record, name, group)
        placed = _placed(site, arrays, record, units)
        yield Seen(name, site.look(placed), {group: {unit: channels[unit] for unit in units}})
        first_owners = {**{unit: channels[k] for k, unit in enumerate(units)}, **first_owners}
    if kept.average:
        by_place = tuple(range(len(next(iter(kept.assignments.values())))))
        placed = _placed(site, kept.average, record, by_place)
        yield Seen(AVERAGE, site.look(placed), {group: first_owners})


def _checked_units(
    kept: MatchedLayer, record: MergeRecord, client: str, group: str
) -> tuple[int, ...]:
    """Return where a client's units went, which must be where the record says."""
    units = kept.assignments[client]
    recorded = record.assignments.get(client, {}).get(group)
    if recorded is None or tuple(recorded.tolist()) != units:
        raise UsageError(
            f"`image`: the layers kept of '{group}' are those of another run",
            "give the `work_dir` of the run that wrote the merged file",
        )
    return units


def _placed(
    site: _Site, arrays: Arrays, record: MergeRecord, units: Sequence[int]
) -> dict[str, Array]:
    """Return a layer's tensors with a client's units at their global places, zeros elsewhere."""
    places = {entry.name: np.arange(entry.width - entry.padding) for entry in record.groups}
    places[site.layer.group] = np.array(units, dtype=np.int64)
    widths = _widths(record)
    assigned = {name: Assignment(indices, widths[name]) for name, indices in places.items()}
    return {
        name: placed_array(arrays[name], record.plan.tensors[name], assigned, widths)
        for name in site.names
    }


def _owner_counts(record: MergeRecord, group: str) -> IntArray:
    """Return how many clients own each global unit (units,)."""
    homes = [own[group] for own in record.assignments.values()]
    return np.bincount(np.concatenate(homes), minlength=_widths(record)[group])


def _widths(record: MergeRecord) -> dict[str, int]:
    return {entry.name: entry.width for entry in record.groups}
