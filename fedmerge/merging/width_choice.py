"""How much merging costs a group's units at every width, and which widths a budget buys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from fedmerge.matching import GroupMatching, UnitFeatures, match_units, prior_at_threshold
from fedmerge.merging.by_weights import Responses, search_options
from fedmerge.merging.session import Session
from fedmerge.values.arrays import Float64Array, FloatArray

STEPS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 6.0, 8.0, 12.0, 16.0)  # × the widest client
FINE = 0.05  # of the widest client: the steps in which widths are chosen
APART = 1 - 1e-3  # correlation from which units are one, whatever the budget
FITTED = 0.75  # of the responses; the others tell how well the fit does
RIDGE = 1e-3

Curve: TypeAlias = Mapping[int, float]  # width → what is lost, a share of the units' variance
Size: TypeAlias = Callable[[Mapping[str, int]], int]


def loss_curves(session: Session, responses: Sequence[Responses]) -> dict[str, Curve]:
    """Return the curve of every group that can grow and whose responses are known."""
    return {
        group.name: loss_curve(session, [client[group.name] for client in responses], group.name)
        for group in session.plan.groups
        if group.can_grow and all(group.name in client for client in responses)
    }


def choose_widths(
    session: Session, curves: Mapping[str, Curve], budget: int | None
) -> dict[str, int]:
    """Return a width per curve's group: as little loss in all as the size budget allows."""
    ties = [tie for tie in session.plan.same_width if set(tie) <= set(curves)]
    return allocate(curves, ties, session.parameters, budget)


def loss_curve(session: Session, responses: Sequence[FloatArray], group: str) -> Curve:
    """Return what is lost of a group's responses at some widths, all units apart the last."""
    units, widest = sum(map(len, responses)), session.widest[group]
    widths = sorted({min(round(step * widest), units) for step in STEPS} | {units})
    return {
        width: 0.0 if width == units else unexplained(responses, _match(session, responses, width))
        for width in widths
    }


def _match(session: Session, responses: Sequence[FloatArray], width: int) -> GroupMatching:
    moment = float(np.mean([np.square(own).mean() for own in responses]))
    return match_units(
        [UnitFeatures(own, np.zeros((len(own), 0), np.float32)) for own in responses],
        prior_at_threshold(APART, moment, gamma=session.dials.gamma),
        search_options(session),
        max_width=width,
        rng=np.random.default_rng(session.options.seed),
    )


def unexplained(responses: Sequence[FloatArray], matching: GroupMatching) -> float:
    """Return which share of the clients' responses no linear map of the merged ones gives.

    Merged units respond as the mean of their owners. The map is fitted on one part of the
    responses and tried on the other, as the layers behind will be.
    """
    merged = np.zeros((matching.width, responses[0].shape[1]))
    for own, assignment in zip(responses, matching.assignments, strict=True):
        merged[assignment.indices] += own
    wanted = np.concatenate(responses).astype(np.float64)
    order = np.random.default_rng(0).permutation(wanted.shape[1])
    fitted, tried = np.split(order, [int(FITTED * len(order))])
    guess = _linear_map(merged[:, fitted], wanted[:, fitted]) @ merged[:, tried]
    total = float(np.square(wanted[:, tried]).sum())
    return float(np.square(wanted[:, tried] - guess).sum()) / total if total else 0.0


def _linear_map(inputs: Float64Array, outputs: Float64Array) -> Float64Array:
    gram = inputs @ inputs.T
    penalty = RIDGE * (np.trace(gram) / len(gram) or 1.0)
    gram[np.diag_indices(len(gram))] += penalty
    return np.asarray(np.linalg.solve(gram, inputs @ outputs.T).T)


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
