"""Match two equally wide clients: one assignment problem, whose solution nothing can improve."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedmerge.matching.assignment import NEW, StepProblem, best_step
from fedmerge.matching.scores import (
    ClientUnits,
    GroupMatching,
    Prior,
    Products,
    SearchOptions,
    Shortcuts,
    TooWide,
    existing_rewards,
    feature_parts,
    multiply,
    new_rewards,
    row_chunks,
    row_products,
)
from fedmerge.values.arrays import Float64Array, FloatArray, IntArray
from fedmerge.values.plans import Assignment

PAIR = 2


def is_pair(clients: Sequence[ClientUnits]) -> bool:
    """Return whether placing one client after the other leaves nothing to gain.

    What two units gain together does not depend on which of them joins the other. So the second of
    two clients has the choice among all pairings, and takes the best one; equally wide, they bring
    equally many new units, and the first one would see the same problem with rows for columns.
    """
    return len(clients) == PAIR and clients[0].features.count == clients[1].features.count


def match_pair(
    clients: Sequence[ClientUnits],
    prior: Prior,
    options: SearchOptions,
    *,
    max_width: int | None,
    shortcuts: Shortcuts,
    is_hopeless: Callable[[int], bool],
) -> GroupMatching:
    """Return the matching of two clients, the first one's units as they are numbered."""
    first, second = clients
    count = first.features.count
    rewards = existing_rewards(
        Products(_inner(second, first, options.device), first.squares),
        second.squares,
        np.ones(count, dtype=np.int64),
        PAIR,
        prior,
    )
    new = new_rewards(count, PAIR, prior.gamma)[: _room(count, max_width, options.unit_cap)]
    targets = best_step(StepProblem(rewards, new), options.solver, shortcuts)
    is_new = targets == NEW
    width = count + int(is_new.sum())
    if is_hopeless(width):
        raise TooWide
    homes = np.where(is_new, count - 1 + np.cumsum(is_new), targets)
    scatter, cosines = _likeness(first, second, targets)
    identity = np.arange(count, dtype=np.int64)
    assignments = (Assignment(identity, width), Assignment(homes.astype(np.int64), width))
    return GroupMatching(assignments, width, 0, scatter, cosines)


def _room(count: int, max_width: int | None, unit_cap: int | None) -> int:
    """Return how many new units the second client may bring."""
    limits = [count]
    if max_width is not None:
        limits.append(max_width - count)
    if unit_cap is not None:
        limits.append(max(unit_cap - count, 1))
    return min(limits)


def _inner(left: ClientUnits, right: ClientUnits, device: str) -> FloatArray:
    """Return the products (units, units) of all units of one client with all of the other."""
    parts = zip(feature_parts(left.features), feature_parts(right.features), strict=True)
    products = [
        multiply(own, other, exact_left=left.exact, exact_right=right.exact, device=device)
        for (_, own), (_, other) in parts
    ]
    return sum(products[1:], products[0])


def _likeness(
    first: ClientUnits, second: ClientUnits, targets: IntArray
) -> tuple[float, tuple[Float64Array, Float64Array]]:
    """Return the scatter, and the cosine of every unit with its partner, NaN where it has none.

    |w - mean|² of both units of a pair is |a - b|²/2 in all.
    """
    paired = np.flatnonzero(targets != NEW)
    partners = targets[paired]
    one, other = first.features.weights, second.features.weights
    products = np.empty(len(paired))
    for rows in row_chunks(len(paired), one.shape[1]):
        products[rows] = row_products(other[paired[rows]], one[partners[rows]])
    squares = first.features.squares[partners], second.features.squares[paired]
    apart = np.maximum(squares[0] + squares[1] - 2 * products, 0.0).sum() / 2
    total = first.total + second.total
    norms = np.sqrt(squares[0]) * np.sqrt(squares[1])
    known = np.full(len(paired), np.nan)
    np.divide(products, norms, out=known, where=norms > 0)
    known = np.clip(known, -1.0, 1.0)
    cosines = np.full(len(targets), np.nan), np.full(len(targets), np.nan)
    cosines[0][partners], cosines[1][paired] = known, known
    return float(apart / total) if total else 0.0, cosines
