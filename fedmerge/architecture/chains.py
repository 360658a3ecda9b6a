"""The plan of a net whose layers follow one another, from names and shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedmerge.architecture.couplings import (
    Activation,
    place_norms,
    refuse_hidden_skips,
    tie_tensors,
)
from fedmerge.architecture.layer_orders import choose_order, drop_misfits, possible_orders
from fedmerge.architecture.layers import (
    MODEL_HINT,
    KnownNet,
    Layer,
    group_layers,
    names_embedding,
    recognise,
)
from fedmerge.architecture.recurrent_layouts import plan_recurrent
from fedmerge.errors import ArchitectureError
from fedmerge.values.clients import TensorInfo
from fedmerge.values.plans import (
    OUTPUT,
    Group,
    Layout,
    Norm,
    Pinned,
    Plan,
    Product,
    TensorPlan,
    Units,
    axis_size,
    groups_in,
    pin_groups,
)


@dataclass(frozen=True)
class Order:
    """The weighted layers in forward order, or none if no order makes them a chain."""

    layers: tuple[Layer, ...] | None
    inferred: bool


def stored_alphabetically(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether the names are sorted, or sorted within each dtype as safetensors does."""
    dtypes = dict.fromkeys(info.dtype for info in tensors.values())
    by_dtype = [[n for n, info in tensors.items() if info.dtype == dtype] for dtype in dtypes]
    in_runs = [name for names in by_dtype for name in names] == list(tensors)
    return in_runs and all(names == sorted(names) for names in by_dtype)


def forward_order(
    layers: Sequence[Layer], *, alphabetical: bool, assume_chain: bool, kept: Collection[str]
) -> Order:
    """Return the weighted layers in forward order: as stored, or as names and widths tell.

    Layers whose tensors are all `kept` are left out where they do not fit.
    """
    if not alphabetical:
        fitting = drop_misfits(layers, kept) if kept else layers
        return Order(tuple(fitting), inferred=False)
    orders = possible_orders(layers)
    if not orders:
        needed = [layer for layer in layers if not set(layer.names) <= set(kept)]
        orders = possible_orders(needed) if len(needed) < len(layers) else orders
    if orders is None or len(orders) > 1:
        orders = [choose_order(orders or [], tuple(layers), assume_chain)]
    return Order(orders[0] if orders else None, inferred=len(layers) > 1)


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
                + (f"not `flatten={expected}`" if expected else "no whole square image"),
                f"say how many with `flatten`, or {MODEL_HINT}",
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
                + (f", which is not `flatten={expected}`" if expected else ""),
                f"if that is so say `flatten={steps}`, or {MODEL_HINT}",
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


_INFERRED = (
    "the file stores names alphabetically: the order of the layers was inferred from their "
    "names, numbers and widths"
)
_GROUPED = (
    "'{}' is assumed to read images of one channel: a grouped convolution of three channels "
    "has the same shape, and needs --model"
)


@dataclass(frozen=True)
class ChainOptions:
    """What the user knows of the net that its names do not show."""

    flatten: int | None = None  # positions per channel, or steps, that a linear layer reads
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
        order = forward_order(
            [layer for layer in layers if layer.is_weighted],
            alphabetical=stored_alphabetically(floats),
            assume_chain=options.assume_chain,
            kept=kept,
        )
        plan = _plan_order(layers, order, options, kept)
        if aliases or plan.norms:
            plan = tie_tensors(plan, aliases)
    except ArchitectureError as error:
        raise ArchitectureError(f"{source}: {error.problem}", error.hint) from None
    return plan


def _plan_order(
    stored: Sequence[Layer], order: Order, options: ChainOptions, kept: Collection[str]
) -> Plan:
    """Return the plan of the layers in that order."""
    if not any(layer.is_weighted for layer in stored):
        raise ArchitectureError("has no layer with weights that are understood", MODEL_HINT)
    # without any order that chains, the stored one tells what does not fit
    chain = order.layers or [layer for layer in stored if layer.is_weighted]
    known = recognise(chain)
    embedded = _starts_with_embedding(chain, known, options.flatten)
    if embedded:
        _refuse_two_embeddings(chain)
    layers: Sequence[Layer] = chain
    if order.layers and not all(layer.is_weighted for layer in stored):
        layers = place_norms(
            chain,
            stored,
            is_ordered=not order.inferred,
            starts_with_embedding=embedded,
            kept=kept,
        )
    walk = Walk(options.flatten)
    for layer in layers:
        walk.step(layer, is_embedding=embedded and layer is chain[0])
    if known is None and not options.assume_chain:
        refuse_hidden_skips(walk.activations)
    plan = walk.finish(known.name if known else "plain chain")
    notes = [_INFERRED] if order.inferred else []
    if chain[0].kind == "conv" and chain[0].input_width == 1 and chain[0].output_width % 3 == 0:
        notes.append(_GROUPED.format(chain[0].prefix))
    return replace(plan, notes=(*plan.notes, *notes))


def _starts_with_embedding(
    chain: Sequence[Layer], known: KnownNet | None, steps: int | None
) -> bool:
    """Rule 3: the first bias-free matrix is an embedding if the next layer reads its axis 1."""
    first, following = chain[0], chain[1:2]
    if first.kind != "linear" or "bias" in first.tensors or not following:
        return False
    if known is not None:
        return known.starts_with_embedding
    rows, columns = first.shape("weight")
    reads = following[0].input_width
    named = names_embedding(first.prefix)
    several = following[0].kind == "linear" and (
        reads == columns * (steps or 1) or (named and reads % columns == 0 and reads != rows)
    )
    if rows == reads and (reads == columns or several):
        raise ArchitectureError(
            f"'{first.name('weight')}' ({rows}×{columns}) may be an embedding or linear", MODEL_HINT
        )
    return reads == columns or several


def _refuse_two_embeddings(chain: Sequence[Layer]) -> None:
    """Refuse a second matrix without bias: it may be looked up too (positions, items)."""
    if len(chain) > 2 and chain[1].kind == "linear" and "bias" not in chain[1].tensors:
        raise ArchitectureError(
            f"'{chain[0].prefix}' is an embedding, and '{chain[1].prefix}' may be one too",
            MODEL_HINT,
        )
