"""Which units of a group tell most of what matters, and which widths a budget buys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from fedmerge.matching import Selection, select_units
from fedmerge.merging.importance import Importance
from fedmerge.merging.session import Session
from fedmerge.values.arrays import Float64Array, FloatArray
from fedmerge.values.plans import Plan

FINE = 0.05  # of the widest client: the steps in which widths are chosen
COLUMNS_PER_SUM = 1024  # of responses that are multiplied at once

Curve: TypeAlias = Mapping[int, float]  # width → what is lost, in nats of divergence from answers
Size: TypeAlias = Callable[[Mapping[str, int]], int]


def select_all(
    plan: Plan, responses: Sequence[Mapping[str, FloatArray]], importance: Sequence[Importance]
) -> dict[str, Selection]:
    """Return every group's units of all clients by what they tell, where responses are known.

    Units inside others are as wide in all of these, so nothing is gained where one of them needs
    more: they stay as wide as they are.
    """
    known = [group for group in responses[0] if all(group in client for client in responses)]
    return {
        group: _selection(group, responses, importance)
        for group in known
        if group not in plan.inside
    }


def _selection(
    group: str, responses: Sequence[Mapping[str, FloatArray]], importance: Sequence[Importance]
) -> Selection:
    each = [client[group] for client in responses]
    matters = [
        own.get(group, np.zeros(len(rows))) for own, rows in zip(importance, each, strict=True)
    ]
    return select_units(_product(np.concatenate(each)), np.concatenate(matters))


def _product(rows: FloatArray) -> Float64Array:
    """Return the product of rows with each other in double precision, a run of columns at once."""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], COLUMNS_PER_SUM):
        run = rows[:, start : start + COLUMNS_PER_SUM].astype(np.float64)
        total += run @ run.T
    return total


def loss_curve(selection: Selection, widest: int) -> Curve:
    """Return what is lost at some widths, from the widest client's to that of all units."""
    units = len(selection.order)
    step = max(1, round(FINE * widest))
    widths = sorted({*range(widest, units, step), units})
    return {width: float(selection.losses[width]) for width in widths}


def choose_widths(
    session: Session, selections: Mapping[str, Selection], budget: int | None
) -> dict[str, int]:
    """Return a width per group that can grow: as little loss in all as the size budget allows."""
    growing = [group.name for group in session.plan.groups if group.can_grow]
    curves = {
        name: loss_curve(selections[name], session.widest[name])
        for name in growing
        if name in selections
    }
    ties = [tie for tie in session.plan.same_width if set(tie) <= set(curves)]
    return allocate(curves, ties, session.parameters, budget)


def allocate(
    curves: Mapping[str, Curve], ties: Sequence[Sequence[str]], size: Size, budget: int | None
) -> dict[str, int]:
    """Return a width per group: the least sum of losses that the size budget allows.

    From the narrowest on, what gains most per parameter is widened, again and again, as long as
    anything fits; losses between tried widths are interpolated. Tied groups widen together.
    """
    widths = {group: min(curve) for group, curve in curves.items()}
    tied = [list(tie) for tie in ties]
    bundles = tied + [[group] for group in curves if not any(group in tie for tie in tied)]
    while True:
        steps = [step for bundle in bundles for step in _steps(curves, widths, bundle)]
        now = size(widths)
        best, best_gain = None, 0.0
        for step in steps:
            cost = size({**widths, **step}) - now
            if budget is not None and now + cost > budget:
                continue
            gain = sum(_loss(curves[g], widths[g]) - _loss(curves[g], w) for g, w in step.items())
            if gain / max(cost, 1) > best_gain:
                best, best_gain = step, gain / max(cost, 1)
        if best is None:
            return widths
        widths |= best


def _steps(
    curves: Mapping[str, Curve], widths: Mapping[str, int], bundle: Sequence[str]
) -> Iterator[dict[str, int]]:
    """Yield wider widths of a bundle: a fine step on, and at the widths that were tried."""
    narrowest = min(curves[bundle[0]])
    fine = max(widths[g] for g in bundle) + max(1, round(FINE * narrowest))
    tried = {width for group in bundle for width in curves[group]}
    for width in sorted({fine, *tried}):
        step = {g: min(width, max(curves[g])) for g in bundle if width > widths[g]}
        if any(width > widths[g] for g, width in step.items()):
            yield step


def _loss(curve: Curve, width: int) -> float:
    """Return the loss at a width, interpolated between the tried ones."""
    for low, high in pairwise(sorted(curve)):
        if low <= width <= high:
            share = (width - low) / (high - low)
            return (1 - share) * curve[low] + share * curve[high]
    return curve[min(curve)] if width <= min(curve) else curve[max(curve)]
