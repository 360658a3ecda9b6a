"""Gather the features by which the units of a group are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.types.arrays import FloatArray
from fedmerge.types.clients import Client
from fedmerge.types.layouts import Layout, Widths, groups_in, terms, unit_positions
from fedmerge.types.plans import Norm, Plan, TensorPlan
from fedmerge.units.blocks import Block, compared, unit_blocks
from fedmerge.units.place import Placement, place_axis
from fedmerge.units.scatter import along


@dataclass(frozen=True)
class TieBreaker:
    """How units with equal incoming weights are told apart.

    Their outgoing weights in ascending order, which no permutation of the following units
    changes, enter the features times `scale`: `count` evenly spaced ones per tensor, however
    wide the next layer of a client is.
    """

    scale: float = 1e-3
    count: int = 32


@dataclass(frozen=True)
class GatheredUnits:
    """One client's units of one group, as rows."""

    weights: FloatArray  # (units, features), what the cost compares
    ties: FloatArray  # (units, tie features), scaled to decide only between equal units
    entries: int  # how many of the weights the client owns; the others pad the global layout


def gather_units(
    client: Client,
    plan: Plan,
    group: str,
    *,
    widths: Widths,
    placed: Placement,
    ties: TieBreaker | None = None,
    outgoing: bool = False,
) -> GatheredUnits:
    """Return the features of a client's units of one group, shape (units, features).

    Incoming weights and biases of every tensor that produces the group, their other axes in the
    global layout as far as `placed` says; `outgoing` adds the weights that read the units, and
    where the group itself is placed, its recurrent weights around that placement. What can't be
    placed yet breaks `ties`, if they are to be broken. Of units that hold other units (heads) what
    no order of the inner ones changes is compared. `widths` are the client's own.
    """
    blocks: dict[Block, list[FloatArray]] = {}
    tie_columns: list[FloatArray] = []
    entries = 0
    for name, axis in plan.axes_of(group):
        tensor = plan.tensors[name]
        is_compared = tensor.role == "weight" and axis == tensor.out
        if outgoing:
            is_compared = tensor.role != "pointwise"
        if is_compared and _is_placeable(tensor, axis, placed):
            values = folded(client, plan, name)
            positions = unit_positions(tensor.axes[axis], group, widths).size
            entries += positions * values.size // values.shape[axis]
            along = np.moveaxis(_place_others(values, tensor, axis, placed), axis, 0)
            for term in terms(tensor.axes[axis], widths):
                for block, part in unit_blocks(along, term, group, placed):
                    blocks.setdefault(block, []).append(part)
        elif ties is not None:
            rows = _unit_rows(client.read(name), tensor.axes[axis], axis, group, widths)
            tie_columns.append(ties.scale * _invariants(rows, ties.count))
    return GatheredUnits(
        weights=_side_by_side([*compared(blocks)], widths[group]),
        ties=_side_by_side(tie_columns, widths[group]),
        entries=entries,
    )


def _is_placeable(tensor: TensorPlan, axis: int, placed: Placement) -> bool:
    """Whether a tensor's values along an axis can be compared between clients."""
    others = (layout for k, layout in enumerate(tensor.axes) if k != axis)
    return all(group in placed for layout in others for group in groups_in(layout))


def _place_others(
    values: FloatArray, tensor: TensorPlan, axis: int, placed: Placement
) -> FloatArray:
    """Return a tensor with all axes but one in the global layout."""
    for other, layout in enumerate(tensor.axes):
        if other != axis and any(groups_in(layout)):
            inputs = {group: placed[group] for group in groups_in(layout)}
            values = place_axis(values, other, layout, inputs)
    return values


def _unit_rows(
    values: FloatArray, layout: Layout, axis: int, group: str, widths: Widths
) -> FloatArray:
    """Return a tensor as (units, values), by the positions of the units along an axis."""
    positions = unit_positions(layout, group, widths)
    return np.moveaxis(values, axis, 0)[positions].reshape(len(positions), -1)


def _invariants(rows: FloatArray, count: int) -> FloatArray:
    """Return `count` evenly spaced ones of each unit's values in ascending order."""
    chosen = np.linspace(0, rows.shape[1] - 1, count).round()
    return np.sort(rows, axis=1)[:, chosen.astype(np.int64)]


def _side_by_side(columns: Sequence[FloatArray], rows: int) -> FloatArray:
    return np.concatenate(columns, axis=1) if columns else np.zeros((rows, 0))


def folded(client: Client, plan: Plan, name: str) -> FloatArray:
    """Return a producing tensor with the batch norm that follows it folded in.

    scale = γ/√(variance + ε); weight → scale·weight, bias → scale·(bias − mean) + β.
    """
    values: FloatArray = client.read(name)
    for norm in plan.norms:
        if name == norm.producer:
            scale = _norm_scale(client, norm)
            tensor = plan.tensors[name]
            return along(scale, tensor.out, values.ndim) * values
        if name == norm.bias:
            scale = _norm_scale(client, norm)
            shift = client.read(norm.shift) if norm.shift else 0.0
            return np.asarray(scale * (values - client.read(norm.mean)) + shift)
    return values


def _norm_scale(client: Client, norm: Norm) -> FloatArray:
    scale = client.read(norm.scale) if norm.scale else 1.0
    return np.asarray(scale / np.sqrt(client.read(norm.variance) + norm.eps))
