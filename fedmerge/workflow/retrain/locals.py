"""The clients' models between rounds, and the layouts that their tensors pass through.

Inside a pass a client's tensors are in a mixed layout: along groups that are matched already they
have the global units, along the others the client's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from fedmerge.types.arrays import Array, IntArray
from fedmerge.types.assignments import Assignment
from fedmerge.types.clients import TensorInfo
from fedmerge.types.layouts import Widths, groups_in, index_map
from fedmerge.types.plans import Plan, TensorPlan, equal_widths
from fedmerge.types.work import Arrays
from fedmerge.units import Placement, place_tensor

_Change: TypeAlias = Callable[[Array, TensorPlan, Placement, Widths], Array]


@dataclass(frozen=True)
class LocalModel:
    """A client of the matching whose tensors are in memory."""

    name: str
    arrays: Arrays

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every array."""
        return {n: TensorInfo(array.shape, array.dtype.name) for n, array in self.arrays.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        """No further names: of tied tensors there is one array."""
        return {}

    def read(self, name: str) -> Array:
        """Return one tensor."""
        return self.arrays[name]

    def updated(self, arrays: Arrays) -> LocalModel:
        """Return the model with some arrays replaced."""
        return replace(self, arrays={**self.arrays, **arrays})

    def without(self, names: Iterable[str]) -> LocalModel:
        """Return the model without some arrays."""
        gone = set(names)
        return replace(self, arrays={n: a for n, a in self.arrays.items() if n not in gone})


def same_units(width: int) -> Assignment:
    """Return the assignment of every unit to the one at its place."""
    return Assignment(np.arange(width), width)


def place_units(model: LocalModel, plan: Plan, placed: Placement, widths: Widths) -> LocalModel:
    """Return the model with the units of some groups permuted and zero-padded as assigned.

    `widths` are those of all groups before.
    """
    return model.updated(_changed(model.arrays, plan, placed, widths, placed_array))


def placed_array(values: Array, tensor: TensorPlan, placed: Placement, widths: Widths) -> Array:
    """Return a tensor with the units of some groups placed, all others where they are."""
    everywhere = {
        group: placed[group] if group in placed else same_units(widths[group])
        for group in _groups_of(tensor)
    }
    new_widths = {group: assignment.width for group, assignment in everywhere.items()}
    return place_tensor(values, tensor, everywhere, new_widths)


def taken_array(values: Array, tensor: TensorPlan, taken: Placement, widths: Widths) -> Array:
    """Return the part of a tensor that belongs to the assigned units: the inverse of placing.

    `widths` are those of groups that are not taken from.
    """
    own = {g: taken[g].width if g in taken else widths[g] for g in _groups_of(tensor)}
    targets: dict[str, IntArray] = {
        group: taken[group].indices if group in taken else np.arange(width)
        for group, width in own.items()
    }
    maps = [index_map(layout, targets, own) for layout in tensor.axes]
    return np.ascontiguousarray(values[np.ix_(*maps)]) if maps else values


def pad_ties(arrays: Arrays, plan: Plan, widths: Widths) -> dict[str, Array]:
    """Return tensors of these widths with tied groups padded to the widest one by zero units.

    Such units get no gradient and stay zero, so that nothing is lost when they are cut again.
    """
    return {**arrays, **_changed(arrays, plan, _padding(plan, widths), widths, placed_array)}


def cut_ties(arrays: Arrays, plan: Plan, widths: Widths) -> dict[str, Array]:
    """Return what `pad_ties` was given."""
    return {**arrays, **_changed(arrays, plan, _padding(plan, widths), widths, taken_array)}


def _padding(plan: Plan, widths: Widths) -> dict[str, Assignment]:
    """Return where the units of groups stand that are narrower than those they are tied to."""
    tied = equal_widths(widths, plan.same_width)
    return {
        group: Assignment(np.arange(width), tied[group])
        for group, width in widths.items()
        if tied[group] > width
    }


def _changed(
    arrays: Arrays, plan: Plan, moved: Placement, widths: Widths, change: _Change
) -> dict[str, Array]:
    """Return those arrays that carry a moved group, changed."""
    return {
        name: change(array, plan.tensors[name], moved, widths)
        for name, array in arrays.items()
        if name in plan.tensors and _groups_of(plan.tensors[name]) & set(moved)
    }


def _groups_of(tensor: TensorPlan) -> set[str]:
    return {group for layout in tensor.axes for group in groups_in(layout)}
