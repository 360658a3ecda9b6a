"""Gather the features of a group's units, place a client into the global layout, average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.types.arrays import Array, Float64Array, FloatArray, IntArray
from fedmerge.types.assignments import Assignment
from fedmerge.types.clients import Client
from fedmerge.types.layouts import Layout, Widths, axis_size, groups_in, index_map, unit_positions
from fedmerge.types.plans import Norm, Plan, TensorPlan

Placement = Mapping[str, Assignment]  # one client's assignment per matched group


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

    @property
    def squares(self) -> float:
        """The sum of all weights' squares."""
        return float(np.sum(np.square(self.weights, dtype=np.float64)))


def gather_units(
    client: Client,
    plan: Plan,
    group: str,
    *,
    widths: Widths,
    placed: Placement,
    ties: TieBreaker,
    outgoing: bool = False,
) -> GatheredUnits:
    """Return the features of a client's units of one group, shape (units, features).

    Incoming weights and biases of every tensor that produces the group, their other axes in the
    global layout as far as `placed` says; `outgoing` adds the weights that read the units, and
    where the group itself is placed, its recurrent weights around that placement. What can't be
    placed yet breaks ties. `widths` are the client's own.
    """
    columns: list[FloatArray] = []
    tie_columns: list[FloatArray] = []
    entries = 0
    for name, axis in plan.axes_of(group):
        tensor = plan.tensors[name]
        values = _folded(client, plan, name)
        is_compared = tensor.role == "weight" and axis == tensor.out
        if outgoing:
            is_compared = tensor.role != "pointwise"
        if is_compared and _is_placeable(tensor, axis, placed):
            entries += values.size
            values = _place_others(values, tensor, axis, placed)
            columns.append(_unit_rows(values, tensor.axes[axis], axis, group, widths))
        else:
            rows = _unit_rows(client.read(name), tensor.axes[axis], axis, group, widths)
            tie_columns.append(_invariants(rows, ties.count))
    return GatheredUnits(
        weights=_side_by_side(columns, widths[group]),
        ties=_side_by_side(tie_columns, widths[group]) * ties.scale,
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
            values = _place_axis(values, other, layout, inputs)
    return values


def _unit_rows(
    values: FloatArray, layout: Layout, axis: int, group: str, widths: Widths
) -> FloatArray:
    """Return a tensor as (units, values), by the positions of the units along an axis."""
    positions = unit_positions(layout, group, widths)
    return np.moveaxis(values, axis, 0)[positions].reshape(len(positions), -1)


def _place_axis(values: FloatArray, axis: int, layout: Layout, placed: Placement) -> FloatArray:
    """Return the tensor with one axis permuted and zero-padded into the global layout."""
    new_widths = {group: assignment.width for group, assignment in placed.items()}
    positions = index_map(layout, _targets(placed), new_widths)
    shape = list(values.shape)
    shape[axis] = axis_size(layout, new_widths)
    if _is_identity(positions, shape[axis]):
        return values
    result = np.zeros(shape, dtype=values.dtype)
    np.moveaxis(result, axis, 0)[positions] = np.moveaxis(values, axis, 0)
    return result


def _invariants(rows: FloatArray, count: int) -> FloatArray:
    """Return `count` evenly spaced ones of each unit's values in ascending order."""
    chosen = np.linspace(0, rows.shape[1] - 1, count).round()
    return np.sort(rows, axis=1)[:, chosen.astype(np.int64)]


def _side_by_side(columns: Sequence[FloatArray], rows: int) -> FloatArray:
    return np.concatenate(columns, axis=1) if columns else np.zeros((rows, 0))


def _folded(client: Client, plan: Plan, name: str) -> FloatArray:
    """Return a producing tensor with the batch norm that follows it folded in.

    scale = γ/√(variance + ε); weight → scale·weight, bias → scale·(bias − mean) + β.
    """
    values: FloatArray = client.read(name)
    for norm in plan.norms:
        if name == norm.producer:
            scale = _norm_scale(client, norm)
            tensor = plan.tensors[name]
            return _along(scale, tensor.out, values.ndim) * values
        if name == norm.bias:
            scale = _norm_scale(client, norm)
            shift = client.read(norm.shift) if norm.shift else 0.0
            return np.asarray(scale * (values - client.read(norm.mean)) + shift)
    return values


def _norm_scale(client: Client, norm: Norm) -> FloatArray:
    scale = client.read(norm.scale) if norm.scale else 1.0
    return np.asarray(scale / np.sqrt(client.read(norm.variance) + norm.eps))


def place_tensor(
    values: FloatArray, tensor: TensorPlan, placement: Placement, widths: Widths
) -> FloatArray:
    """Return a client's tensor in the global layout, zero where it owns nothing."""
    placed = np.zeros(tuple(axis_size(layout, widths) for layout in tensor.axes))
    maps = [index_map(layout, _targets(placement), widths) for layout in tensor.axes]
    _add(placed, maps, np.asarray(values, dtype=np.float64))
    return np.asarray(placed, dtype=values.dtype)


@dataclass(frozen=True)
class Averaging:
    """How much each client counts.

    `shrinkage` is added to the owners' weights of a hidden unit (the paper's posterior mean at
    σ²/σ0²); `recurrent_over_all` divides recurrent tensors by all clients, not by the owners.
    """

    client_weights: tuple[float, ...]
    class_weights: Float64Array | None = None  # (clients, outputs), columns sum to 1
    shrinkage: float = 0.0
    recurrent_over_all: bool = False

    def output_weights(self, client: int, tensor: TensorPlan) -> Float64Array:
        """Return what a client counts for a tensor: one number, or one per output."""
        if self.class_weights is not None and tensor.makes_outputs:
            return np.asarray(self.class_weights[client])
        return np.array(self.client_weights[client], dtype=np.float64)

    def divisor(self, owned: Float64Array, tensor: TensorPlan) -> Float64Array:
        """Return what a tensor's weighted sum is divided by: per output unit, or one number."""
        if self.recurrent_over_all and tensor.role == "recurrent":
            return np.array(sum(self.client_weights))
        is_hidden = tensor.produces and tensor.role != "pointwise"
        shrinkage = self.shrinkage if is_hidden else 0.0
        return np.where(owned > 0, owned + shrinkage, 1.0)


def average_tensor(
    name: str,
    clients: Sequence[Client],
    plan: Plan,
    *,
    placements: Sequence[Placement],
    widths: Widths,
    averaging: Averaging,
) -> FloatArray:
    """Return one global tensor: each unit's mean over the clients that own it.

    G[u, i] = Σ ω_j W_j[u, i] / Σ ω_j over the owners j of output unit u; an input unit that j
    does not own counts as 0. Every client owns a pinned output.
    """
    tensor = plan.tensors[name]
    total = np.zeros(tuple(axis_size(layout, widths) for layout in tensor.axes))
    owned = np.zeros(total.shape[tensor.out] if tensor.axes else ())
    stored = []
    for number, (client, placement) in enumerate(zip(clients, placements, strict=True)):
        values = client.read(name)
        stored.append(values.dtype)
        weights = averaging.output_weights(number, tensor)
        maps = [index_map(layout, _targets(placement), widths) for layout in tensor.axes]
        wide = np.asarray(values, dtype=np.float64)
        _add(total, maps, wide * _along(weights, tensor.out, wide.ndim))
        _add(owned, maps[tensor.out : tensor.out + 1], weights)
    divisor = _along(averaging.divisor(owned, tensor), tensor.out, total.ndim)
    return np.asarray(total / divisor, dtype=np.result_type(*stored))


def _add(total: Float64Array, maps: Sequence[IntArray], values: Float64Array) -> None:
    """Add values at the positions that the axes' maps give, in place."""
    if all(map(_is_identity, maps, total.shape)):
        total += values
    else:
        total[np.ix_(*maps)] += values


def _targets(placement: Placement) -> dict[str, IntArray]:
    return {group: assignment.indices for group, assignment in placement.items()}


def _is_identity(positions: IntArray, size: int) -> bool:
    return len(positions) == size and bool(np.all(positions == np.arange(size)))


def _along(vector: Array, axis: int, dimensions: int) -> Array:
    """Return a vector shaped to broadcast along one axis; a single number stays as it is."""
    return (
        vector.reshape([-1 if k == axis else 1 for k in range(dimensions)])
        if vector.ndim
        else vector
    )
