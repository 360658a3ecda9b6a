"""Which units of all clients stand for all: those whose responses tell most of what matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedmerge.matching.assignment import solve
from fedmerge.matching.scores import GroupMatching, SolverName, UnitFeatures
from fedmerge.values.arrays import Float64Array, IntArray
from fedmerge.values.plans import Assignment

TURNS = 256  # in which units are chosen: one by one where there are no more
NOISE = 0.02  # share of a unit's responses that is taken for chance
SAME = 1 - 1e-3  # correlation from which one unit says all that another does
CHOSEN, SAID, OPEN = 0, 1, 2  # units that somebody stands for are chosen after all others


@dataclass(frozen=True)
class Selection:
    """All clients' units of a group, those first that tell most of what matters."""

    order: IntArray  # (units,) numbers among all clients' units, one client after the other
    losses: Float64Array  # (units + 1,) what is lost if only so many of them are kept


def select_units(products: Float64Array, importance: Float64Array) -> Selection:
    """Order units by how much of all units' responses they explain, weighted by importance.

    Each turn takes the unit j that lowers Σ_v importance_v · |what the chosen leave of v|² most,
    by Σ_v importance_v · G_vj² / G_jj with G the products of what is left (a pivoted Cholesky
    factorisation). `products` are correlations (units, units).
    """
    count = len(products)
    left = products + NOISE * np.eye(count)
    rank = np.full(count, OPEN)
    weights = np.array(importance, dtype=np.float64)
    order: list[int] = []
    losses = [float(weights @ left.diagonal())]
    while len(order) < count:
        for unit in _best(left, weights, rank, math.ceil(count / TURNS)):
            is_same = np.abs(products[unit]) > SAME
            rank[is_same] = np.minimum(rank[is_same], SAID)
            rank[unit] = CHOSEN
            weights[is_same] = 0.0
            column = left[:, unit] / math.sqrt(max(left[unit, unit], NOISE**2))
            left -= np.outer(column, column)
            order.append(unit)
            losses.append(float(weights @ np.maximum(left.diagonal(), 0.0)))
    return Selection(np.array(order, dtype=np.int64), np.array(losses))


def _best(left: Float64Array, weights: Float64Array, rank: IntArray, count: int) -> list[int]:
    """Return the units of the highest rank that explain most of what is left.

    Of units that explain nothing the first ones: one client's, in whose order others' can join.
    """
    explained = (weights @ np.square(left)) / np.maximum(left.diagonal(), NOISE**2)
    ordered = np.lexsort((-explained, -rank))[:count]
    return [int(unit) for unit in ordered if rank[unit] == rank[ordered[0]]]


def represent(
    units: Sequence[UnitFeatures], order: IntArray, width: int, solver: SolverName
) -> GroupMatching:
    """Make the first units of an order global; every other one joins one that is most alike it.

    Global units are numbered by client and unit. No client has more than `width` units, so none
    is lost. Scatter is the squared distance of units to those that stand for them, not to a mean.
    """
    counts = [own.count for own in units]
    assert max(counts) <= width <= sum(counts), "no client loses a unit"
    rows = _unit_rows(units)
    chosen = np.sort(order[:width])
    starts = np.cumsum([0, *counts])
    leaders = np.searchsorted(starts, chosen, side="right") - 1
    assignments, similarities, apart = [], [], 0.0
    for client, (start, stop) in enumerate(pairwise(starts.tolist())):
        own, others = np.flatnonzero(leaders == client), np.flatnonzero(leaders != client)
        targets = np.full(stop - start, -1, dtype=np.int64)
        targets[chosen[own] - start] = own
        rest = np.flatnonzero(targets < 0)
        targets[rest] = others[solve(rows[start + rest] @ rows[chosen[others]].T, solver)]
        assignments.append(Assignment(targets, width))
        alike = np.einsum("ij,ij->i", rows[start:stop], rows[chosen[targets]])
        apart += float(np.square(rows[start:stop] - rows[chosen[targets]]).sum())
        similarities.append(np.where(leaders[targets] == client, np.nan, alike))
    return GroupMatching(
        tuple(assignments),
        width,
        sweeps=0,
        scatter=apart / (float(np.square(rows).sum()) or 1.0),
        similarities=tuple(similarities),
        leaders=tuple(leaders.tolist()),
    )


def _unit_rows(units: Sequence[UnitFeatures]) -> Float64Array:
    """Return all clients' features at length 1: products are cosines."""
    rows = np.concatenate([np.concatenate([u.weights, u.ties], axis=1) for u in units])
    rows = rows.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))
