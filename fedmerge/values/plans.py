"""The plan: which axis of which tensor carries which group of hidden units.

A layout says how the positions along one axis are indexed by units. It is a small tree: the units
of a group, a pinned run of positions, a row-major product or a concatenation of layouts.

>>> flat = Product((Units("conv2"), Pinned(4)))  # conv2's channels, each with 2x2 pixels
>>> axis_size(flat, {"conv2": 3})
12
>>> unit_positions(flat, "conv2", {"conv2": 3})[1].tolist()
[4, 5, 6, 7]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np

from fedmerge.values.arrays import IntArray


@dataclass(frozen=True)
class Units:
    """One position per unit of a group.

    Inside another group, further out in the same product, every unit of that one has an order of
    its own: the units of every attention head.
    """

    group: str
    inside: str | None = None


@dataclass(frozen=True)
class Pinned:
    """Positions whose order is fixed, and why (inputs, outputs, gates, pixels)."""

    size: int
    reason: str = ""


@dataclass(frozen=True)
class Product:
    """Row-major product of layouts, the first factor slowest."""

    factors: tuple[Layout, ...]


@dataclass(frozen=True)
class Concat:
    """Layouts one after another."""

    parts: tuple[Layout, ...]


Layout: TypeAlias = Units | Pinned | Product | Concat
Widths: TypeAlias = Mapping[str, int]  # units per group


def groups_in(layout: Layout) -> Iterator[str]:
    """Yield the groups of a layout from left to right, with repeats."""
    match layout:
        case Units(group):
            yield group
        case Product(children) | Concat(children):
            for child in children:
                yield from groups_in(child)


def replace_groups(layout: Layout, replace: Callable[[str], Layout]) -> Layout:
    """Return the layout with every group's place taken by `replace(group)`.

    Units inside a group that is no group any more have one order.
    """
    match layout:
        case Units(group, inside):
            new = replace(group)
            if inside is None or not isinstance(new, Units):
                return new
            outer = replace(inside)
            return Units(new.group, outer.group if isinstance(outer, Units) else None)
        case Product(factors):
            return Product(tuple(replace_groups(factor, replace) for factor in factors))
        case Concat(parts):
            return Concat(tuple(replace_groups(part, replace) for part in parts))
    return layout


def axis_size(layout: Layout, widths: Widths) -> int:
    """Return the length of an axis under the given group widths."""
    match layout:
        case Units(group):
            return widths[group]
        case Pinned(size):
            return size
        case Product(factors):
            return reduce(lambda size, factor: size * axis_size(factor, widths), factors, 1)
        case Concat(parts):
            return sum(axis_size(part, widths) for part in parts)


def index_map(
    layout: Layout,
    targets: Mapping[str, IntArray],
    widths: Widths,
    *,
    within: Mapping[str, int] = MappingProxyType({}),
) -> IntArray:
    """Return the new position (axis size,) of every old position along an axis.

    `targets[group]` (units,) is each old unit's new unit, `widths` the new widths; new positions
    that nothing maps to are the padding. Of a group inside another one, targets may be (outer
    units, units); `within` says of which outer units the layout is.
    """
    match layout:
        case Units(group, inside):
            own = targets[group]
            return own if own.ndim == 1 or inside is None else own[within[inside]]
        case Pinned(size):
            return np.arange(size)
        case Product(factors):
            return _product_map([*_flat(factors)], targets, widths, within)
        case Concat(parts):
            maps = [index_map(part, targets, widths, within=within) for part in parts]
            starts = _starts([axis_size(part, widths) for part in parts])
            return np.concatenate([m + start for m, start in zip(maps, starts, strict=True)])


def _flat(factors: Iterable[Layout]) -> Iterator[Layout]:
    """Yield the factors of a product of products."""
    for factor in factors:
        yield from _flat(factor.factors) if isinstance(factor, Product) else (factor,)


def _product_map(
    factors: Sequence[Layout],
    targets: Mapping[str, IntArray],
    widths: Widths,
    within: Mapping[str, int],
) -> IntArray:
    """Return the map of a row-major product, in which units may hold others in own orders."""
    first, *others = factors
    own = index_map(first, targets, widths, within=within)
    if not others:
        return own
    starts = own * axis_size(Product(tuple(others)), widths)
    orders = {group: targets[group].ndim for factor in others for group in inner_groups(factor)}
    if not isinstance(first, Units) or set(orders.values()) <= {1}:
        rest = _product_map(others, targets, widths, within)
        return np.add.outer(starts, rest).reshape(-1)
    rows = (
        start + _product_map(others, targets, widths, {**within, first.group: unit})
        for unit, start in enumerate(starts.tolist())
    )
    return np.concatenate([np.zeros(0, dtype=np.int64), *rows])


def inner_groups(layout: Layout) -> dict[str, str]:
    """Return the groups of a layout that stand inside others, and these."""
    match layout:
        case Units(group, str(inside)):
            return {group: inside}
        case Product(children) | Concat(children):
            return {k: v for child in children for k, v in inner_groups(child).items()}
    return {}


@dataclass(frozen=True)
class Term:
    """A part of an axis that is a plain product: no concatenation inside."""

    factors: tuple[Units | Pinned, ...]
    positions: IntArray  # along the axis, one dimension per factor

    def units(self, group: str) -> int | None:
        """Return which of the factors are the units of a group, if any."""
        found = [k for k, factor in enumerate(self.factors) if _is_of(factor, group)]
        assert len(found) < 2, "a group may stand in one factor of a product only"
        return found[0] if found else None

    def around(self, group: str) -> int | None:
        """Return which of the factors are the units that the group's stand inside, if any."""
        place = self.units(group)
        inside = None if place is None else getattr(self.factors[place], "inside", None)
        return None if inside is None else self.units(inside)


def _is_of(factor: Units | Pinned, group: str) -> bool:
    return isinstance(factor, Units) and factor.group == group


def terms(layout: Layout, widths: Widths) -> Iterator[Term]:
    """Yield an axis as a sum of plain products, from left to right.

    `heads × (a + b)` gives `heads × a` and `heads × b`.
    """
    match layout:
        case Units() | Pinned():
            yield Term((layout,), np.arange(axis_size(layout, widths)))
        case Product(factors):
            sizes = [axis_size(factor, widths) for factor in factors]
            for chosen in itertools.product(*(tuple(terms(f, widths)) for f in factors)):
                yield _joined(chosen, sizes)
        case Concat(parts):
            starts = _starts([axis_size(part, widths) for part in parts])
            for part, start in zip(parts, starts, strict=True):
                for term in terms(part, widths):
                    yield Term(term.factors, term.positions + start)


def _joined(chosen: Sequence[Term], sizes: Sequence[int]) -> Term:
    """Return the row-major product of one term of every factor; `sizes` are the whole factors'."""
    positions = np.zeros((), dtype=np.int64)
    for term, size in zip(chosen, sizes, strict=True):
        positions = np.add.outer(positions * size, term.positions)
    return Term(tuple(f for term in chosen for f in term.factors), positions)


def plain_products(layout: Layout) -> Iterator[tuple[Units | Pinned, ...]]:
    """Yield the factors of an axis's plain products, from left to right."""
    match layout:
        case Units() | Pinned():
            yield (layout,)
        case Product(factors):
            for chosen in itertools.product(*(tuple(plain_products(f)) for f in factors)):
                yield tuple(itertools.chain(*chosen))
        case Concat(parts):
            for part in parts:
                yield from plain_products(part)


def outer_groups(layout: Layout) -> Iterator[str]:
    """Yield the groups that stand around others in a product: heads around their units."""
    for factors in plain_products(layout):
        yield from [factor.group for factor in factors if isinstance(factor, Units)][:-1]


def unit_positions(layout: Layout, group: str, widths: Widths) -> IntArray:
    """Return the positions (units, positions per unit) of each unit of a group along an axis.

    Of a group inside another one, a row is a unit of an outer unit: (outer units × units, …).
    """
    rows = widths[group] * (widths[inside] if (inside := inner_groups(layout).get(group)) else 1)
    found = [np.empty((rows, 0), dtype=np.int64)]
    for term in terms(layout, widths):
        place, around = term.units(group), term.around(group)
        if place is not None:
            leading = [place] if around is None else [around, place]
            own = np.moveaxis(term.positions, leading, range(len(leading)))
            found.append(own.reshape(rows, -1))
    return np.concatenate(found, axis=1)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]


@dataclass(frozen=True)
class Assignment:
    """Injective map from one client's units of one group to global units.

    Of a group inside another one there may be a map for every outer unit of the client, to the
    units of the global outer unit that this one became.
    """

    indices: IntArray  # (units,) or (outer units, units), the global unit of each client unit
    width: int  # global units of the group; of every outer unit

    def __post_init__(self) -> None:
        assert self.indices.ndim in (1, 2)
        for row in np.atleast_2d(self.indices):
            assert len(set(row.tolist())) == len(row), "not injective"
            assert len(row) == 0 or 0 <= row.min() <= row.max() < self.width

    @property
    def units(self) -> int:
        """How many units the client has; of every outer unit."""
        return int(self.indices.shape[-1])

    def numbers(self, outer: Assignment | None = None) -> IntArray:
        """Return the numbers (units,) of global units, counted over all outer ones."""
        if outer is None or self.indices.ndim == 1:
            return self.indices.reshape(-1)
        return (outer.indices[:, None] * self.width + self.indices).reshape(-1)


Role: TypeAlias = Literal["weight", "recurrent", "pointwise"]

OUTPUT = "output"  # the reason that pins the axis of a network's outputs


@dataclass(frozen=True)
class Group:
    """All tensor axes indexed by the same hidden units."""

    name: str
    can_grow: bool = True
    why: str = ""  # why it can't grow
    width: int | None = None  # in every client, where no shape shows it (heads × units per head)


@dataclass(frozen=True)
class TensorPlan:
    """One layout per axis of a tensor, and what the tensor does.

    `out` is the axis of the units that the tensor produces. Roles: a `weight` (or bias) makes
    units from inputs, a `recurrent` one from the previous step's state, a `pointwise` one scales
    or shifts units one by one (norms, PReLU).
    """

    axes: tuple[Layout, ...]
    out: int = 0
    role: Role = "weight"

    @property
    def produces(self) -> frozenset[str]:
        """The groups on the out axis."""
        return frozenset(groups_in(self.axes[self.out])) if self.axes else frozenset()

    @property
    def makes_outputs(self) -> bool:
        """Whether the tensor's out axis is the network's output."""
        return bool(self.axes) and getattr(self.axes[self.out], "reason", None) == OUTPUT

    @property
    def consumes(self) -> frozenset[str]:
        """The groups on the other axes."""
        others = (axis for k, axis in enumerate(self.axes) if k != self.out)
        return frozenset(group for axis in others for group in groups_in(axis))


@dataclass(frozen=True)
class Norm:
    """A batch norm that directly follows the one producer of its units."""

    producer: str  # the producing weight's name
    bias: str | None  # the producing bias's name
    scale: str | None
    shift: str | None
    mean: str
    variance: str
    eps: float = 1e-5


@dataclass(frozen=True)
class Plan:
    """Groups in forward order, and the layouts of every tensor that is matched and averaged."""

    groups: tuple[Group, ...]
    tensors: Mapping[str, TensorPlan]
    norms: tuple[Norm, ...] = ()
    same_width: tuple[tuple[str, ...], ...] = ()  # groups that must end equally wide
    kept: tuple[str, ...] = ()  # tensors taken from the first client as they are
    architecture: str = ""
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        net = self.architecture or "a net"
        return f"<Plan of {net}, groups: {len(self.groups)}, tensors: {len(self.tensors)}>"

    @property
    def is_recurrent(self) -> bool:
        """Whether any tensor is fed by the previous step's state."""
        return any(tensor.role == "recurrent" for tensor in self.tensors.values())

    def group(self, name: str) -> Group:
        """Return the group of that name."""
        return next(group for group in self.groups if group.name == name)

    @cached_property
    def inside(self) -> Mapping[str, str]:
        """The groups whose units have an order of their own in every unit of another, and these."""
        layouts = (axis for tensor in self.tensors.values() for axis in tensor.axes)
        return {group: outer for axis in layouts for group, outer in inner_groups(axis).items()}

    def axes_of(self, group: str) -> Iterator[tuple[str, int]]:
        """Yield every (tensor, axis) that carries the group."""
        yield from self._axes.get(group, ())

    @cached_property
    def _axes(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """Group → (tensor, axis), found once: plans may have thousands of both."""
        found: dict[str, list[tuple[str, int]]] = {}
        for name, tensor in self.tensors.items():
            for axis, layout in enumerate(tensor.axes):
                for group in set(groups_in(layout)):
                    found.setdefault(group, []).append((name, axis))
        return found


def pin_groups(plan: Plan, widths: Mapping[str, int], reason: str) -> Plan:
    """Return the plan with the groups named in `widths` pinned at those widths."""

    def pinned(group: str) -> Layout:
        return Pinned(widths[group], reason) if group in widths else Units(group)

    tensors = {
        name: replace(tensor, axes=tuple(replace_groups(axis, pinned) for axis in tensor.axes))
        for name, tensor in plan.tensors.items()
    }
    tied_to_pinned = {g for tie in plan.same_width if set(tie) & set(widths) for g in tie}
    why = f"must stay as wide as a pinned layer ({reason})"
    groups = tuple(
        replace(group, can_grow=False, why=why) if group.name in tied_to_pinned else group
        for group in plan.groups
        if group.name not in widths
    )
    same_width = (tuple(g for g in tie if g not in widths) for tie in plan.same_width)
    ties = tuple(tie for tie in same_width if len(tie) > 1)
    return replace(plan, groups=groups, tensors=tensors, same_width=ties)


def equal_widths(widths: Mapping[str, int], ties: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return the widths with every tie raised to its widest group."""
    raised = dict(widths)
    for tie in map(tuple, ties):
        raised.update(dict.fromkeys(tie, max(widths[group] for group in tie)))
    return raised


def is_alone(plan: Plan, group: str) -> bool:
    """Return whether no units of a group stand inside, or around, those of another one."""
    return not any(
        any(_is_of(factor, group) for factor in factors)
        and sum(isinstance(factor, Units) for factor in factors) > 1
        for tensor in plan.tensors.values()
        for layout in tensor.axes
        for factors in plain_products(layout)
    )


def neighbours(plan: Plan, group: str) -> list[str]:
    """Return the groups that share a tensor with a group, in the plan's order.

    Itself included only where it is on several axes of a tensor, as recurrent units are: there its
    own order decides what its units are compared by.
    """
    found: set[str] = set()
    for tensor in plan.tensors.values():
        axes = [set(groups_in(axis)) for axis in tensor.axes]
        own = sum(group in groups for groups in axes)
        if own:
            found |= set().union(*axes) - (set() if own > 1 else {group})
    return [each.name for each in plan.groups if each.name in found]
