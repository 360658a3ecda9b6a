"""Optimal-transport fusion (Singh and Jaggi, 2020): units couple softly, layer after layer.

for every group of hidden units, first to last:
    C[i, j] = ‖incoming weights of unit i - those of unit j of the widest client‖²
    T = argmin ⟨T, C⟩ / mean(C) - ε H(T), T 1 = 1/m, Tᵀ 1 = 1/n     `coupling`
    what makes units: Wᵢ → n Σᵢ Tᵢⱼ Wᵢ; what reads them: m Σᵢ Tᵢⱼ Wᵢ   `_transported`
the merge is the clients' average
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedmerge.matching import GroupMatching
from fedmerge.matching.features import Placement, gather_units
from fedmerge.merging.averages import average_tensor
from fedmerge.merging.result import Merge, Solution, merge_of
from fedmerge.merging.session import Session
from fedmerge.values.arrays import Array, Float64Array
from fedmerge.values.clients import Client, ClientView
from fedmerge.values.nesting import with_inside
from fedmerge.values.plans import Assignment, Layout, Plan, Widths, axis_size, terms
from fedmerge.values.wording import Progress

DEFAULT_REGULARISATION = 0.01  # copies come back to the last digit, and units still share
SCALINGS = 1000  # of a coupling's rows and columns, at every ε on the way down to the last
CLOSE = 1e-9  # how near a coupling's sums are to what they shall be when scaling ends


@dataclass(frozen=True)
class _Moved(ClientView):
    """A client some of whose tensors have been transported."""

    arrays: Mapping[str, Array] = field(default_factory=dict)

    def read(self, name: str) -> Array:
        """Return one tensor, as it is by now."""
        return self.arrays[name] if name in self.arrays else self.client.read(name)


def merge_by_transport(session: Session, progress: Progress) -> Merge:
    """Transport every client's units to those of the widest client, and average."""
    session = replace(session, plan=with_inside(session.plan, {}))
    plan, widths = session.plan, [dict(own) for own in session.client_widths]
    clients = [_Moved(client) for client in session.aligned]
    matchings: dict[str, GroupMatching] = {}
    for number, group in enumerate(plan.groups):
        progress("matching", number, len(plan.groups))
        couplings = _couplings(session, group.name, clients, widths, tuple(matchings))
        for k, found in enumerate(couplings):
            clients[k] = _transported(clients[k], plan, group.name, found, widths[k])
            widths[k][group.name] = found.shape[1]
        matchings[group.name] = _nearest_matching(couplings)
    progress("matching", len(plan.groups), len(plan.groups))
    merge = merge_of(session, Solution(matchings, None), is_compared=False)
    return replace(merge, fitted=_averaged(merge, clients))


def _couplings(
    session: Session,
    group: str,
    clients: Sequence[Client],
    widths: Sequence[Widths],
    done: Sequence[str],
) -> list[Float64Array]:
    """Return the coupling of every client's units with those of the widest one."""
    units = [
        gather_units(client, session.plan, group, widths=own, placed=_in_place(done, own)).weights
        for client, own in zip(clients, widths, strict=True)
    ]
    widest = max(range(len(units)), key=lambda k: len(units[k]))
    given = session.options.regularisation
    regularisation = DEFAULT_REGULARISATION if given is None else given
    return [
        _unmoved(len(own)) if k == widest else coupling(_costs(own, units[widest]), regularisation)
        for k, own in enumerate(units)
    ]


def _in_place(groups: Sequence[str], widths: Widths) -> Placement:
    return {group: Assignment(np.arange(widths[group]), widths[group]) for group in groups}


def _unmoved(units: int) -> Float64Array:
    return np.eye(units) / units


def _costs(rows: Array, columns: Array) -> Float64Array:
    """Return the squared distances (rows, columns) of units (units, features)."""
    one, other = rows.astype(np.float64), columns.astype(np.float64)
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
    return np.asarray(np.maximum(squares, 0.0))


def coupling(costs: Float64Array, regularisation: float) -> Float64Array:
    """Return the entropic coupling (rows, columns) of evenly weighted units, by Sinkhorn's scaling.

    T = exp((f_i + g_j - C_ij / mean(C)) / ε). ε is halved down to the regularisation, each time
    from the potentials found before. Rows then sum to 1/m and columns to 1/n exactly.
    """
    mean = costs.mean() if costs.size else 0.0
    scaled = costs / mean if mean > 0 else costs
    rows, columns = (-np.log(size) for size in costs.shape)
    of_columns = np.zeros(costs.shape[1])
    halvings = max(0, int(np.ceil(-np.log2(regularisation))))
    for epsilon in (regularisation * 2.0**k for k in reversed(range(halvings + 1))):
        of_rows = epsilon * rows - _softly_least(of_columns - scaled, epsilon, axis=1)
        for _ in range(SCALINGS):
            of_columns = epsilon * columns - _softly_least(
                of_rows[:, None] - scaled, epsilon, axis=0
            )
            before = of_rows
            of_rows = epsilon * rows - _softly_least(of_columns - scaled, epsilon, axis=1)
            if np.abs(of_rows - before).max() <= CLOSE * epsilon:
                break
    return _with_even_sums(np.exp((of_rows[:, None] + of_columns - scaled) / epsilon))


def _softly_least(values: Float64Array, epsilon: float, *, axis: int) -> Float64Array:
    """Return ε log Σ exp(values / ε) along an axis."""
    highest = values.max(axis=axis, keepdims=True)
    sums = np.exp((values - highest) / epsilon).sum(axis=axis)
    return np.asarray(highest.squeeze(axis) + epsilon * np.log(sums))


def _with_even_sums(near: Float64Array) -> Float64Array:
    """Return a coupling with even sums of rows and of columns, near one that almost has them.

    Rows and columns with too much are scaled down, and what is missing is spread over all
    (Altschuler, Weed and Rigollet, 2017).
    """
    rows, columns = (1 / size for size in near.shape)
    near = near * np.minimum(1.0, rows / near.sum(axis=1))[:, None]
    near = near * np.minimum(1.0, columns / near.sum(axis=0))
    of_rows = np.maximum(rows - near.sum(axis=1), 0.0)
    of_columns = np.maximum(columns - near.sum(axis=0), 0.0)
    if (total := of_rows.sum()) > 0:
        near = near + np.outer(of_rows, of_columns) / total
    return np.asarray(near)


def _transported(
    client: _Moved, plan: Plan, group: str, found: Float64Array, widths: Widths
) -> _Moved:
    """Return the client with the group's units in those of the global layout.

    What makes a unit is the mean over those that couple with it; what reads a unit is divided
    among them, so that sums over all units stay as they are.
    """
    after = {**widths, group: found.shape[1]}
    arrays = dict(client.arrays)
    for name, axis in plan.axes_of(group):
        tensor = plan.tensors[name]
        size = found.shape[1 if axis == tensor.out else 0]
        values = arrays[name] if name in arrays else client.read(name)
        moved = _along(values, axis, tensor.axes[axis], group, size * found.T, (widths, after))
        arrays[name] = moved.astype(values.dtype)
    return replace(client, arrays=arrays)


def _along(
    values: Array,
    axis: int,
    layout: Layout,
    group: str,
    matrix: Float64Array,
    widths: tuple[Widths, Widths],
) -> Float64Array:
    """Return a tensor with a matrix (new units, units) applied to a group's units along an axis.

    `widths` are those before and after.
    """
    before, after = widths
    rows = np.moveaxis(values, axis, 0)
    moved = np.zeros((axis_size(layout, after), *rows.shape[1:]))
    for old, new in zip(terms(layout, before), terms(layout, after), strict=True):
        part, place = rows[old.positions], old.units(group)
        if place is not None:
            part = np.moveaxis(np.tensordot(matrix, part, (1, place)), 0, place)
        moved[new.positions] = part
    return np.moveaxis(moved, 0, axis)


def _nearest_matching(couplings: Sequence[Float64Array]) -> GroupMatching:
    """Return the assignment of every client's units that couples most, which records can show."""
    width = couplings[0].shape[1]
    assignments = tuple(
        Assignment(np.asarray(linear_sum_assignment(found, maximize=True)[1]), width)
        for found in couplings
    )
    return GroupMatching(assignments=assignments, width=width, sweeps=0, scatter=0.0)


def _averaged(merge: Merge, clients: Sequence[Client]) -> dict[str, Array]:
    """Return the average of every tensor that was transported."""
    placed = [_in_place(tuple(merge.widths), merge.widths)] * len(clients)
    moved = {name for group in merge.widths for name, _ in merge.plan.axes_of(group)}
    return {
        name: average_tensor(
            name,
            clients,
            merge.plan,
            placements=placed,
            widths=merge.widths,
            averaging=merge.session.averaging,
        )
        for name in merge.plan.tensors
        if name in moved
    }
