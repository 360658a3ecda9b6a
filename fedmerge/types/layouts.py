"""How the positions along one tensor axis are indexed by hidden units.

A layout is a small tree: the units of a group, a pinned run of positions, a row-major product or
a concatenation of layouts.

>>> flat = Product((Units("conv2"), Pinned(4)))  # conv2's channels, each with 2x2 pixels
>>> axis_size(flat, {"conv2": 3})
12
>>> unit_positions(flat, "conv2", {"conv2": 3})[1].tolist()
[4, 5, 6, 7]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np

from fedmerge.types.arrays import IntArray


@dataclass(frozen=True)
class Units:
    """One position per unit of a group."""

    group: str


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
    """Return the layout with every group's place taken by `replace(group)`."""
    match layout:
        case Units(group):
            return replace(group)
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


def index_map(layout: Layout, targets: Mapping[str, IntArray], widths: Widths) -> IntArray:
    """Return the new position (axis size,) of every old position along an axis.

    `targets[group]` (units,) is each old unit's new unit, `widths` the new widths; new positions
    that nothing maps to are the padding.
    """
    match layout:
        case Units(group):
            return targets[group]
        case Pinned(size):
            return np.arange(size)
        case Product(factors):
            maps = [index_map(factor, targets, widths) for factor in factors]
            sizes = [axis_size(factor, widths) for factor in factors]
            return _outer(maps, sizes)
        case Concat(parts):
            maps = [index_map(part, targets, widths) for part in parts]
            starts = _starts([axis_size(part, widths) for part in parts])
            return np.concatenate([m + start for m, start in zip(maps, starts, strict=True)])


def unit_positions(layout: Layout, group: str, widths: Widths) -> IntArray:
    """Return the positions (units, positions per unit) of each unit of a group along an axis."""
    match layout:
        case Units(name) if name == group:
            return np.arange(widths[group])[:, None]
        case Product(factors) if group in groups_in(layout):
            return _positions_in_product(factors, group, widths)
        case Concat(parts):
            starts = _starts([axis_size(part, widths) for part in parts])
            found = [
                unit_positions(part, group, widths) + start
                for part, start in zip(parts, starts, strict=True)
            ]
            return np.concatenate(found, axis=1)
    return np.empty((widths[group], 0), dtype=np.int64)


def _positions_in_product(factors: Sequence[Layout], group: str, widths: Widths) -> IntArray:
    owners = [k for k, factor in enumerate(factors) if group in groups_in(factor)]
    assert len(owners) == 1, "a group may stand in one factor of a product only"
    sizes = [axis_size(factor, widths) for factor in factors]
    grid = np.arange(int(np.prod(sizes))).reshape(sizes)
    rows = np.moveaxis(grid, owners[0], 0)
    inner = unit_positions(factors[owners[0]], group, widths)
    return rows[inner].reshape(widths[group], -1)


def _outer(maps: Sequence[IntArray], sizes: Sequence[int]) -> IntArray:
    """Combine the factors' maps into the map of their row-major product."""
    combined = np.zeros(1, dtype=np.int64)
    for positions, size in zip(maps, sizes, strict=True):
        combined = (combined[:, None] * size + positions[None, :]).reshape(-1)
    return combined


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]
