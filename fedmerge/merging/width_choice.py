"""How much merging costs a group's units at every width, and which widths a budget buys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
SWEEPS = 1  # over the clients: a curve is an estimate
ROUNDING = 1e-8  # of the mean product of a unit with itself, far above what sums are rounded by
COLUMNS_PER_SUM = 1024  # of responses that are multiplied at once

Curve: TypeAlias = Mapping[int, float]  # width → what is lost, a share of the units' variance
Size: TypeAlias = Callable[[Mapping[str, int]], int]


def loss_curves(session: Session, responses: Sequence[Responses]) -> dict[str, Curve]:
    """Return the curve of every group that can grow and whose responses are known.

    Units inside others are as wide in all of these, so nothing is gained where one of them needs
    more: they stay as wide as they are.
    """
    return {
        group.name: loss_curve(session, [client[group.name] for client in responses], group.name)
        for group in session.plan.groups
        if group.can_grow
        and group.name not in session.plan.inside
        and all(group.name in client for client in responses)
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
    products = unit_products(responses)
    moment = float(np.mean([np.square(own).mean() for own in responses]))
    prior = prior_at_threshold(APART, moment, gamma=session.dials.gamma)
    features = _short_features(responses, products)

    def loss(width: int) -> float:
        rng = np.random.default_rng(session.options.seed)
        options = replace(search_options(session), sweeps=SWEEPS)
        matching = match_units(features, prior, options, max_width=width, rng=rng)
        return unexplained(products, matching)

    return {width: 0.0 if width == units else loss(width) for width in widths}


def _short_features(responses: Sequence[FloatArray], products: UnitProducts) -> list[UnitFeatures]:
    """Return rows with the responses' products, no longer than there are units: those of a root.

    Matching depends on products alone, and is done at many widths.
    """
    every = products.fitted + products.tried
    if len(every) < responses[0].shape[1]:
        rounding = ROUNDING * float(np.trace(every)) / len(every) or 1.0
        root = np.linalg.cholesky(every + rounding * np.eye(len(every))).astype(np.float32)
        responses = np.split(root, np.cumsum([len(own) for own in responses[:-1]]))
    return [UnitFeatures(own, np.zeros((len(own), 0), np.float32)) for own in responses]


@dataclass(frozen=True)
class UnitProducts:
    """Products (units, units) of the responses of all clients' units, of two parts of them."""

    fitted: Float64Array
    tried: Float64Array


def unit_products(responses: Sequence[FloatArray]) -> UnitProducts:
    """Return the products of responses (units, columns), one array per client."""
    every = np.concatenate(responses).astype(np.float32)
    order = np.random.default_rng(0).permutation(every.shape[1])
    parts = np.split(order, [int(FITTED * len(order))])
    fitted, tried = (_product(np.ascontiguousarray(every[:, part])) for part in parts)
    return UnitProducts(fitted, tried)


def _product(rows: FloatArray) -> Float64Array:
    """Return the product of rows with each other in double precision, a run of columns at once."""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], COLUMNS_PER_SUM):
        run = rows[:, start : start + COLUMNS_PER_SUM].astype(np.float64)
        total += run @ run.T
    return total


def unexplained(products: UnitProducts, matching: GroupMatching) -> float:
    """Return which share of the clients' responses no linear map of the merged ones gives.

    Merged units respond as the mean of their owners. The map is fitted on one part of the
    responses and tried on the other, as the layers behind will be. With the units' responses R and
    merged ones M·R all follows from R·Rᵀ: the map is R·RᵀMᵀ (M·RRᵀMᵀ + λ)⁻¹.
    """

    def merged(values: Float64Array) -> Float64Array:
        total, start = np.zeros((matching.width, values.shape[1])), 0
        for assignment in matching.assignments:
            units = len(assignment.indices)
            total[assignment.indices] += values[start : start + units]
            start += units
        return total

    cross = merged(products.fitted)
    guess = _linear_map(merged(np.ascontiguousarray(cross.T)), cross)
    total = float(np.trace(products.tried))
    tried = merged(products.tried)
    gram = merged(np.ascontiguousarray(tried.T))
    error = total - 2 * float((guess * tried.T).sum()) + float((guess @ gram * guess).sum())
    return max(0.0, error) / total if total else 0.0


def _linear_map(gram: Float64Array, cross: Float64Array) -> Float64Array:
    """Return the map (units, merged) of merged responses with these products, a little damped."""
    penalty = RIDGE * (np.trace(gram) / len(gram) or 1.0)
    damped = gram + penalty * np.eye(len(gram))
    return np.asarray(np.linalg.solve(damped, cross).T)


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
