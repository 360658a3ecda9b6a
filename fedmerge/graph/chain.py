"""A plan from the state dict alone, for plain chains of layers (never strictly sound: say so)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedmerge.errors import ArchitectureError
from fedmerge.graph.known import recognise
from fedmerge.graph.layers import MODEL_HINT, Layer, group_layers
from fedmerge.graph.skips import Activation, refuse_hidden_skips
from fedmerge.graph.ties import tie_tensors
from fedmerge.types.clients import TensorInfo
from fedmerge.types.layouts import Concat, Layout, Pinned, Product, Units, axis_size, groups_in
from fedmerge.types.plans import OUTPUT, Group, Norm, Plan, TensorPlan, pin_groups


@dataclass(frozen=True)
class ChainOptions:
    """What the user knows of the net that its names do not show."""

    flatten: int | None = None  # positions per channel where a convolution meets a linear layer
    assume_chain: bool = False  # take equal widths for a plain chain


def plan_chain(
    tensors: Mapping[str, TensorInfo],
    options: ChainOptions,
    *,
    aliases: Mapping[str, str],
    kept: Collection[str] = (),
    source: str,
) -> Plan:
    """Return the plan of a plain chain of layers, or refuse with the reason.

    Layers whose tensors are all `kept` may fall out of the chain.
    """
    try:
        floats = {name: info for name, info in tensors.items() if info.is_float}
        layers = group_layers(floats, kept=kept)
        known = recognise(layers)
        walk = _Walk(options, starts_with_embedding=known.starts_with_embedding if known else None)
        for position, layer in enumerate(layers):
            if walk.fits(layer) or not set(layer.names) <= set(kept):
                walk.step(layer, layers[position + 1 : position + 2])
        if known is None and not options.assume_chain:
            refuse_hidden_skips(walk.activations)
        plan = tie_tensors(walk.finish(known.name if known else "plain chain"), aliases)
    except ArchitectureError as error:
        raise ArchitectureError(f"{source}: {error.problem}", error.hint) from None
    return plan


@dataclass
class _Walk:
    """The walk's state: what has been planned, and the layout of the activations in hand."""

    options: ChainOptions
    starts_with_embedding: bool | None
    tensors: dict[str, TensorPlan] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)  # groups in forward order
    fixed: dict[str, str] = field(default_factory=dict)  # groups that can't grow, with the reason
    norms: list[Norm] = field(default_factory=list)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    current: Layout | None = None  # None before the first layer
    spatial: int | None = None  # spatial axes of the activations in hand; None: unknown input
    previous: Layer | None = None  # the layer just walked
    activations: list[Activation] = field(default_factory=list)  # input first, output last

    def fits(self, layer: Layer) -> bool:
        """Return whether the layer can read the activations in hand."""
        if self.current is None or layer.kind == "scale":
            return True
        rest = _input_width(layer) % self.width
        return rest == 0 if self.spatial else _input_width(layer) == self.width

    def step(self, layer: Layer, following: Sequence[Layer]) -> None:
        if self._is_embedding(layer, following):
            self._embedding(layer)
        else:
            _STEPS[layer.kind](self, layer)
        if layer.kind in ("linear", "conv", "recurrent"):
            self.activations.append(Activation(layer.prefix, self.width, self.spatial or 0))
        self.previous = layer

    def finish(self, architecture: str) -> Plan:
        """Pin the last activations, which are the net's outputs."""
        assert self.current is not None
        plan = Plan(
            groups=tuple(Group(g, g not in self.fixed, self.fixed.get(g, "")) for g in self.widths),
            tensors=self.tensors,
            norms=tuple(self.norms),
            same_width=tuple(self.ties),
            architecture=architecture,
            notes=(
                f"assumed to be a plain chain of layers ({architecture}), as names and shapes "
                "suggest: a skip connection would not show in them",
            ),
        )
        outputs = {group: self.widths[group] for group in groups_in(self.current)}
        return pin_groups(plan, outputs, OUTPUT)

    @property
    def width(self) -> int:
        assert self.current is not None
        return axis_size(self.current, self.widths)

    def new_group(self, name: str, width: int) -> Layout:
        self.widths[name] = width
        return Units(name)

    def _is_embedding(self, layer: Layer, following: Sequence[Layer]) -> bool:
        """Rule 3: the first bias-free matrix is an embedding if the next layer reads its axis 1."""
        if layer.kind != "linear" or "bias" in layer.tensors or self.current is not None:
            return False
        if self.starts_with_embedding is not None:
            return self.starts_with_embedding
        rows, columns = layer.shape("weight")
        reads = _input_width(following[0]) if following else None
        if rows == columns == reads:
            raise ArchitectureError(
                f"'{layer.name('weight')}' ({rows}×{columns}) may be an embedding or linear",
                MODEL_HINT,
            )
        return reads == columns

    def _embedding(self, layer: Layer) -> None:
        rows, columns = layer.shape("weight")
        self.current, self.spatial = self.new_group(layer.prefix, columns), 0
        axes = (Pinned(rows, "tokens"), self.current)
        self.tensors[layer.name("weight")] = TensorPlan(axes, out=1)

    def _read(self, layer: Layer, width: int) -> Layout:
        """Return the layout of a layer's input axis of the given size."""
        if self.current is None:
            self.current = Pinned(width, "input")
            spatial = len(layer.shape("weight")) - 2 if layer.kind == "conv" else 0
            self.activations.append(Activation("the input", width, spatial))
        if width == self.width:
            return self.current
        raise ArchitectureError(
            f"'{layer.prefix}' reads {width} values, but '{self._previous}' gives {self.width}",
            MODEL_HINT,
        )

    @property
    def _previous(self) -> str:
        return self.previous.prefix if self.previous else "the input"

    def linear(self, layer: Layer) -> None:
        rows, columns = layer.shape("weight")
        if self.spatial:
            self._flatten(layer, columns)
        axes = (self.new_group(layer.prefix, rows), self._read(layer, columns))
        self._produce(layer, axes)
        self.spatial = 0

    def _flatten(self, layer: Layer, columns: int) -> None:
        """Rule 2: channels × positions, where the number of positions must be plausible."""
        assert self.spatial
        assert self.current is not None
        positions, rest = divmod(columns, self.width)
        side = round(positions ** (1 / self.spatial))
        expected = self.options.flatten
        plausible = positions == expected if expected else side**self.spatial == positions
        if rest or not positions or not plausible:
            shown = f"{columns} / {self.width} = {columns / self.width:g} positions per channel"
            raise ArchitectureError(
                f"'{layer.prefix}' reads '{self._previous}' with {shown}, which is "
                + (f"not --flatten {expected}" if expected else "no whole square image"),
                f"say how many with --flatten, or {MODEL_HINT}",
            )
        if positions > 1:
            self.current = Product((self.current, Pinned(positions)))
        self.spatial = 0

    def conv(self, layer: Layer) -> None:
        rows, columns, *kernel = layer.shape("weight")
        if self.current is not None:
            self._check_conv(layer, rows, columns, len(kernel))
        taps = tuple(Pinned(size) for size in kernel)
        axes = (self.new_group(layer.prefix, rows), self._read(layer, columns), *taps)
        self._produce(layer, axes)
        self.spatial = len(kernel)

    def _check_conv(self, layer: Layer, rows: int, columns: int, spatial: int) -> None:
        if self.spatial not in (None, spatial):
            raise ArchitectureError(
                f"'{layer.prefix}' convolves what '{self._previous}' gives, which is no image",
                MODEL_HINT,
            )
        if columns != self.width and (rows == self.width or self.width % columns == 0):
            raise ArchitectureError(
                f"'{layer.name('weight')}' looks like a transposed, grouped or "
                f"depthwise convolution ({rows}×{columns}, reading {self.width} channels)",
                MODEL_HINT,
            )

    def _produce(self, layer: Layer, axes: tuple[Layout, ...]) -> None:
        self.tensors[layer.name("weight")] = TensorPlan(axes)
        if "bias" in layer.tensors:
            self.tensors[layer.name("bias")] = TensorPlan(axes[:1])
        self.current = axes[0]

    def batch_norm(self, layer: Layer) -> None:
        (width,) = layer.shape("running_mean")
        follows_producer = self.previous is not None and self.previous.kind in ("linear", "conv")
        if self.spatial and width != self.width:
            self._flatten(layer, width)
            follows_producer = False
        self._pointwise(layer, (self._read(layer, width),))
        if follows_producer and self.previous:
            self.norms.append(_fold(layer, self.previous))

    def norm(self, layer: Layer) -> None:
        """Walk an affine norm without statistics, or a PReLU with a slope per unit."""
        if self.spatial and "bias" in layer.tensors:
            raise ArchitectureError(
                f"'{layer.prefix}' normalises '{self._previous}' without running statistics: "
                "group, layer and instance norm look alike here",
                MODEL_HINT,
            )
        self._pointwise(layer, (self._read(layer, *layer.shape("weight")),))
        if not self.spatial:
            assert self.current is not None
            why = f"the norm '{layer.prefix}' would see the added units"
            self.fixed.update(dict.fromkeys(groups_in(self.current), why))

    def scale(self, layer: Layer) -> None:
        """Walk a single number (PReLU's slope), the same for every unit."""
        self._pointwise(layer, (Pinned(1, "scalar"),))

    def _pointwise(self, layer: Layer, axes: tuple[Layout, ...]) -> None:
        for leaf in layer.tensors:
            self.tensors[layer.name(leaf)] = TensorPlan(axes, role="pointwise")

    def recurrent(self, layer: Layer) -> None:
        """Walk a stack of LSTM, GRU or RNN layers: gates × hidden rows, hidden columns."""
        if self.spatial:
            raise ArchitectureError(
                f"'{layer.prefix}' is recurrent and reads the convolution '{self._previous}'",
                MODEL_HINT,
            )
        self.spatial = 0
        hidden: list[str] = []
        projected: list[str] = []
        for directions in _recurrent_levels(layer):
            assert directions
            reading = self._read(layer, layer.shape(f"weight_ih{directions[0]}")[1])
            outputs = [self._cell(layer, end, reading, hidden, projected) for end in directions]
            self.current = outputs[0] if len(outputs) == 1 else Concat(tuple(outputs))
        self.ties += [tuple(names) for names in (hidden, projected) if len(names) > 1]

    def _cell(
        self, layer: Layer, end: str, reading: Layout, hidden: list[str], projected: list[str]
    ) -> Layout:
        """Plan one layer of one direction, whose tensors' names end in `end`."""
        rows = layer.shape(f"weight_ih{end}")[0]
        state_width = layer.shape(f"weight_hh{end}")[1]
        has_projection = f"weight_hr{end}" in layer.tensors
        width = layer.shape(f"weight_hr{end}")[1] if has_projection else state_width
        gates = _gates(layer, rows, width)
        name = f"{layer.prefix}{end}" if layer.prefix else end.lstrip("_")
        units = self.new_group(name, width)
        hidden.append(name)
        state = units
        if has_projection:
            state = self.new_group(f"{name}.projection", state_width)
            projected.append(f"{name}.projection")
        produced = Product((Pinned(gates), units)) if gates > 1 else units
        planned = {
            "weight_ih": TensorPlan((produced, reading)),
            "weight_hh": TensorPlan((produced, state), role="recurrent"),
            "bias_ih": TensorPlan((produced,)),
            "bias_hh": TensorPlan((produced,), role="recurrent"),
            "weight_hr": TensorPlan((state, units)),
        }
        for leaf, tensor in planned.items():
            if leaf + end in layer.tensors:
                self.tensors[layer.name(leaf + end)] = tensor
        return state


_STEPS: Mapping[str, Callable[[_Walk, Layer], None]] = {
    "linear": _Walk.linear,
    "conv": _Walk.conv,
    "batch norm": _Walk.batch_norm,
    "norm": _Walk.norm,
    "scale": _Walk.scale,
    "recurrent": _Walk.recurrent,
}


def _recurrent_levels(layer: Layer) -> list[list[str]]:
    """Return the endings of each layer's tensor names, one per direction, bottom layer first."""
    ends = [leaf.removeprefix("weight_ih") for leaf in layer.tensors if "weight_ih" in leaf]
    levels: dict[str, list[str]] = {}
    for end in sorted(ends, key=lambda e: (int((re.findall(r"\d+", e) or ["0"])[0]), e)):
        levels.setdefault(end.removesuffix("_reverse"), []).append(end)
        if f"weight_hh{end}" not in layer.tensors:
            raise ArchitectureError(f"'{layer.prefix}' has no weight_hh{end}", MODEL_HINT)
    return list(levels.values())


def _gates(layer: Layer, rows: int, width: int) -> int:
    gates, rest = divmod(rows, width)
    if rest or gates not in (1, 3, 4):
        raise ArchitectureError(
            f"'{layer.prefix}' has {rows} rows for {width} hidden units, "
            "expected 1 (RNN), 3 (GRU) or 4 (LSTM) per unit",
            MODEL_HINT,
        )
    return gates


def _fold(norm: Layer, producer: Layer) -> Norm:
    def named(layer: Layer, leaf: str) -> str | None:
        return layer.name(leaf) if leaf in layer.tensors else None

    return Norm(
        producer=producer.name("weight"),
        bias=named(producer, "bias"),
        scale=named(norm, "weight"),
        shift=named(norm, "bias"),
        mean=norm.name("running_mean"),
        variance=norm.name("running_var"),
    )


def _input_width(layer: Layer) -> int:
    if layer.kind == "recurrent":
        end = _recurrent_levels(layer)[0][0]
        return layer.shape(f"weight_ih{end}")[1]
    if layer.kind in ("linear", "conv"):
        return layer.shape("weight")[1]
    return layer.shape("running_mean" if layer.kind == "batch norm" else "weight")[0]
