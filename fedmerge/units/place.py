"""Bring a client's tensors into the global layout."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedmerge.types.arrays import FloatArray, IntArray
from fedmerge.types.assignments import Assignment
from fedmerge.types.layouts import Layout, Widths, axis_size, index_map
from fedmerge.types.plans import TensorPlan
from fedmerge.units.scatter import add_mapped, take_mapped

Placement = Mapping[str, Assignment]  # one client's assignment per matched group


def place_tensor(
    values: FloatArray, tensor: TensorPlan, placement: Placement, widths: Widths
) -> FloatArray:
    """Return a client's tensor in the global layout, zero where it owns nothing."""
    placed = np.zeros(tuple(axis_size(layout, widths) for layout in tensor.axes))
    maps = [index_map(layout, targets_of(placement), widths) for layout in tensor.axes]
    add_mapped(placed, maps, values, np.array(1.0))
    return np.asarray(placed, dtype=values.dtype)


def place_axis(values: FloatArray, axis: int, layout: Layout, placed: Placement) -> FloatArray:
    """Return the tensor with one axis permuted and zero-padded into the global layout."""
    new_widths = {group: assignment.width for group, assignment in placed.items()}
    positions = index_map(layout, targets_of(placed), new_widths)
    return take_mapped(values, axis, positions, axis_size(layout, new_widths))


def targets_of(placement: Placement) -> dict[str, IntArray]:
    """Return the global unit of every unit (units,) of each placed group."""
    return {group: assignment.indices for group, assignment in placement.items()}
