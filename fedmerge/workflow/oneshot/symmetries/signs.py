"""Signs of units: which groups have them free, and which signs make clients most alike."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.matching.solvers import solve
from fedmerge.matching.values import SolverName
from fedmerge.types.arrays import Float64Array, FloatArray, IntArray
from fedmerge.types.layouts import Units, Widths, axis_size, plain_products, unit_positions
from fedmerge.types.plans import Plan
from fedmerge.workflow.oneshot.symmetries.rewritten import Change
from fedmerge.workflow.oneshot.symmetries.trial import Trial

MOST_PARTS = 8  # blocks of rows, such as gates, that are tried one by one
SWEEPS = 4  # of comparing every client with the mean of the others, at most


def signed_groups(
    trial: Trial,
    plan: Plan,
    widths: Widths,
    *,
    rng: np.random.Generator,
    but: Container[str] = (),
) -> dict[str, int | None]:
    """Return the groups, but for some, whose units may change sign, with the rows that change too.

    These are all rows that make a unit (None), or one block of them, as an LSTM's candidate gate.
    """
    found: dict[str, int | None] = {}
    tried = (own.name for own in plan.groups if own.name not in but)
    for group in (name for name in tried if _stands_alone(plan, name)):
        signs = _half_flipped(widths[group], rng)
        for part in _parts(plan, widths, group):
            if trial.keeps_outputs(sign_change(plan, widths, group, part, signs)):
                found[group] = part
                break
    return found


def sign_change(
    plan: Plan, widths: Widths, group: str, part: int | None, signs: Float64Array
) -> Change:
    """Return what signs (units,) of a group change: who makes its units, and who reads them."""
    shifts = {name for norm in plan.norms for name in (norm.mean, norm.shift)}
    change: dict[str, dict[int, Float64Array]] = {}
    for name, axis in plan.axes_of(group):
        tensor = plan.tensors[name]
        if tensor.role == "pointwise" and name not in shifts:
            continue  # a scale, which is the same for both signs
        places = unit_positions(tensor.axes[axis], group, widths)
        if axis == tensor.out and part is not None and places.shape[1] > 1:
            places = places[:, [part]]
        factors = np.ones(axis_size(tensor.axes[axis], widths))
        factors[places] = signs[:, None]
        change.setdefault(name, {})[axis] = factors
    return change


def _stands_alone(plan: Plan, group: str) -> bool:
    """Return whether no unit of a group stands around others, as heads do, or within them."""
    layouts = (plan.tensors[name].axes[axis] for name, axis in plan.axes_of(group))
    products = (factors for layout in layouts for factors in plain_products(layout))
    return all(
        sum(isinstance(factor, Units) for factor in factors) == 1
        for factors in products
        if Units(group) in factors
    )


def _parts(plan: Plan, widths: Widths, group: str) -> list[int | None]:
    """Return which rows might change with their unit: all of them, or one block of several."""
    made = (name for name, axis in plan.axes_of(group) if plan.tensors[name].out == axis)
    axes = (tensor.axes[tensor.out] for tensor in map(plan.tensors.__getitem__, made))
    counts = {unit_positions(layout, group, widths).shape[1] for layout in axes} - {1}
    if len(counts) != 1 or max(counts) > MOST_PARTS:
        return [None]
    return [None, *range(max(counts))]


def _half_flipped(units: int, rng: np.random.Generator) -> Float64Array:
    """Return signs (units,), those of a random half of them, at least one, changed."""
    signs = np.ones(units)
    signs[rng.permutation(units)[: -(-units // 2)]] = -1.0
    return signs


@dataclass
class _Mean:
    """What the units of clients that are aligned respond in all, unit by unit of the widest."""

    total: Float64Array  # (units, columns)
    solver: SolverName

    def add(self, own: FloatArray, signs: Float64Array, places: IntArray) -> None:
        """Add a client's units."""
        self.total[places] += signs[:, None] * own

    def compared(self, own: FloatArray) -> tuple[Float64Array, IntArray]:
        """Return the signs and places (units,) at which a client's units are most alike."""
        lengths = np.linalg.norm(self.total, axis=1, keepdims=True)
        alike = own.astype(np.float64) @ (self.total / np.where(lengths > 0, lengths, 1.0)).T
        places = solve(np.abs(alike), self.solver)
        signs = np.where(alike[np.arange(len(own)), places] < 0, -1.0, 1.0)
        return signs, places


def alike_signs(responses: Sequence[FloatArray], solver: SolverName) -> list[Float64Array]:
    """Return signs (units,) for every client, given responses (units, columns) of length 1 about 0.

    The widest client begins; the others' units are assigned, by the size of their correlations, to
    the mean of those before, then all again to the mean of all others until no sign changes.
    """
    widest = max(range(len(responses)), key=lambda k: len(responses[k]))
    mean = _Mean(np.zeros(responses[widest].shape), solver)
    signs = [np.ones(len(own)) for own in responses]
    places = [np.arange(len(own)) for own in responses]
    mean.add(responses[widest], signs[widest], places[widest])
    for number, own in enumerate(responses):
        if number != widest:
            signs[number], places[number] = mean.compared(own)
            mean.add(own, signs[number], places[number])
    for _ in range(SWEEPS if len(responses) > 2 else 0):
        is_same = True
        for number, own in enumerate(responses):
            before = signs[number]
            mean.add(own, -before, places[number])
            signs[number], places[number] = mean.compared(own)
            mean.add(own, signs[number], places[number])
            is_same &= bool((before == signs[number]).all())
        if is_same:
            break
    return signs
