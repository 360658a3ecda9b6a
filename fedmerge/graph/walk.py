"""A walk along a chain of layers, which plans their tensors one layer after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fedmerge.errors import ArchitectureError
from fedmerge.graph.layers import MODEL_HINT, Layer
from fedmerge.graph.recurrent import plan_recurrent
from fedmerge.graph.skips import Activation
from fedmerge.types.layouts import Layout, Pinned, Product, Units, axis_size, groups_in
from fedmerge.types.plans import OUTPUT, Group, Norm, Plan, TensorPlan, pin_groups


@dataclass
class Walk:
    """What has been planned so far, and the layout of the activations in hand."""

    flatten: int | None  # positions per channel, or steps, that a linear layer reads at once
    tensors: dict[str, TensorPlan] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)  # groups in forward order
    fixed: dict[str, str] = field(default_factory=dict)  # groups that can't grow, with the reason
    norms: list[Norm] = field(default_factory=list)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    current: Layout | None = None  # None before the first layer
    spatial: int | None = None  # spatial axes of the activations in hand; None: unknown input
    in_steps: bool = False  # whether they are one per step of a sequence
    previous: Layer | None = None  # the layer just walked
    activations: list[Activation] = field(default_factory=list)  # input first, output last

    def step(self, layer: Layer, *, is_embedding: bool) -> None:
        """Plan the next layer's tensors."""
        if is_embedding:
            self._embedding(layer)
        else:
            _STEPS[layer.kind](self, layer)
        if layer.is_weighted:
            kind = "embedding" if is_embedding else layer.kind
            self.activations.append(Activation(layer.prefix, self.width, self.spatial or 0, kind))
            self.in_steps = kind in ("embedding", "recurrent")
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
        """How wide the activations in hand are."""
        assert self.current is not None
        return axis_size(self.current, self.widths)

    def _new_group(self, name: str, width: int) -> Layout:
        self.widths[name] = width
        return Units(name)

    def _embedding(self, layer: Layer) -> None:
        rows, columns = layer.shape("weight")
        self.current, self.spatial = self._new_group(layer.prefix, columns), 0
        axes = (Pinned(rows, "tokens"), self.current)
        self.tensors[layer.name("weight")] = TensorPlan(axes, out=1)

    def _read(self, layer: Layer, width: int) -> Layout:
        """Return the layout of a layer's input axis of the given size."""
        if self.current is None:
            self.current = Pinned(width, "input")
            spatial = len(layer.shape("weight")) - 2 if layer.kind == "conv" else 0
            self.activations.append(Activation("the input", width, spatial, "input"))
        if width == self.width:
            return self.current
        raise ArchitectureError(
            f"'{layer.prefix}' reads {width} values, but '{self._previous}' gives {self.width}",
            MODEL_HINT,
        )

    @property
    def _previous(self) -> str:
        return self.previous.prefix if self.previous else "the input"

    def _linear(self, layer: Layer) -> None:
        rows, columns = layer.shape("weight")
        if self.spatial:
            self._flatten(layer, columns)
        elif self.in_steps and columns != self.width:
            self._join_steps(layer, columns)
        axes = (self._new_group(layer.prefix, rows), self._read(layer, columns))
        self._produce(layer, axes)
        self.spatial = 0

    def _flatten(self, layer: Layer, columns: int) -> None:
        """Rule 2: channels × positions, where the number of positions must be plausible."""
        assert self.spatial
        assert self.current is not None
        positions, rest = divmod(columns, self.width)
        side = round(positions ** (1 / self.spatial))
        expected = self.flatten
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

    def _join_steps(self, layer: Layer, columns: int) -> None:
        """Several steps of a sequence side by side, each with all its units."""
        assert self.current is not None
        steps, rest = divmod(columns, self.width)
        if rest:
            return  # said by `_read`
        if steps != self.flatten:
            expected = self.flatten
            raise ArchitectureError(
                f"'{layer.prefix}' reads '{self._previous}' with {columns} / {self.width} = "
                f"{steps} steps side by side"
                + (f", which is not --flatten {expected}" if expected else ""),
                f"if that is so say --flatten {steps}, or {MODEL_HINT}",
            )
        self.current = Product((Pinned(steps), self.current))

    def _conv(self, layer: Layer) -> None:
        rows, columns, *kernel = layer.shape("weight")
        if self.spatial is None and self.activations:  # a norm stands before it
            self.activations[0] = replace(self.activations[0], spatial=len(kernel))
        if self.current is not None:
            self._check_conv(layer, rows, columns, len(kernel))
        taps = tuple(Pinned(size) for size in kernel)
        axes = (self._new_group(layer.prefix, rows), self._read(layer, columns), *taps)
        self._produce(layer, axes)
        self.spatial = len(kernel)

    def _check_conv(self, layer: Layer, rows: int, columns: int, spatial: int) -> None:
        is_text = self.in_steps and self.activations[-1].kind == "embedding" and spatial == 1
        if self.spatial not in (None, spatial) and not is_text:
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

    def _batch_norm(self, layer: Layer) -> None:
        (width,) = layer.shape("running_mean")
        follows_producer = (
            self.previous is not None
            and self.previous.kind in ("linear", "conv")
            and self.activations[-1].kind != "embedding"
        )
        if self.spatial and width != self.width:
            self._flatten(layer, width)
            follows_producer = False
        self._pointwise(layer, (self._read(layer, width),))
        if follows_producer and self.previous:
            self.norms.append(_fold(layer, self.previous))

    def _norm(self, layer: Layer) -> None:
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

    def _scale(self, layer: Layer) -> None:
        """Walk a single number (PReLU's slope), the same for every unit."""
        self._pointwise(layer, (Pinned(1, "scalar"),))

    def _pointwise(self, layer: Layer, axes: tuple[Layout, ...]) -> None:
        for leaf in layer.tensors:
            self.tensors[layer.name(leaf)] = TensorPlan(axes, role="pointwise")

    def _recurrent(self, layer: Layer) -> None:
        """Walk a stack of LSTM, GRU or RNN layers: gates × hidden rows, hidden columns."""
        if self.spatial:
            raise ArchitectureError(
                f"'{layer.prefix}' is recurrent and reads the convolution '{self._previous}'",
                MODEL_HINT,
            )
        self.spatial = 0
        reading = self._read(layer, layer.input_width)
        stack = plan_recurrent(layer, reading, layer.input_width)
        self.tensors.update(stack.tensors)
        self.widths.update(stack.widths)
        self.ties += stack.ties
        self.current = stack.output


_STEPS: Mapping[str, Callable[[Walk, Layer], None]] = {
    "linear": Walk._linear,
    "conv": Walk._conv,
    "batch norm": Walk._batch_norm,
    "norm": Walk._norm,
    "scale": Walk._scale,
    "recurrent": Walk._recurrent,
}


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
