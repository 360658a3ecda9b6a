"""Clients whose right matching is known, and plain-loop versions of what is tested."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from fedmerge.matching import (
    NEW,
    GroupMatching,
    Prior,
    SearchOptions,
    Shortcuts,
    StepProblem,
    UnitFeatures,
    match_units,
    prior_at_threshold,
)
from fedmerge.values import Float64Array, FloatArray, IntArray

NO_SHORTCUTS = Shortcuts(
    reuse=False,
    skip=False,
    bound=False,
    prune=False,
    reduce=False,
    price=False,
    greedy=False,
    pair=False,
)


def features(weights: FloatArray, ties: FloatArray | None = None) -> UnitFeatures:
    """Return units with the given tie-breakers, or none."""
    no_ties = np.zeros((len(weights), 0), weights.dtype)
    return UnitFeatures(weights, no_ties if ties is None else ties)


def random_clients(
    counts: Sequence[int], length: int, *, rng: np.random.Generator
) -> list[UnitFeatures]:
    """Return clients with independent units."""
    return [features(rng.standard_normal((count, length))) for count in counts]


def permuted_copies(
    weights: FloatArray, ties: FloatArray, clients: int, *, rng: np.random.Generator
) -> tuple[list[UnitFeatures], list[IntArray]]:
    """Return clients that hold the same units in different orders, and those orders."""
    orders = [np.arange(len(weights)), *(rng.permutation(len(weights)) for _ in range(clients - 1))]
    return [UnitFeatures(weights[order], ties[order]) for order in orders], orders


def match_at(
    clients: Sequence[UnitFeatures], threshold: float, *, gamma: float = 1.0, seed: int = 0
) -> GroupMatching:
    """Match at a threshold, with the second moment of the clients' weights as scale."""
    moment = float(np.mean(np.concatenate([c.weights.ravel() for c in clients]) ** 2))
    prior = prior_at_threshold(threshold, moment, gamma=gamma)
    rng = np.random.default_rng(seed)
    return match_units(clients, prior, SearchOptions(), max_width=None, rng=rng)


def indices(matching: GroupMatching) -> list[list[int]]:
    """Return the assignments as plain lists."""
    return [assignment.indices.tolist() for assignment in matching.assignments]


def plain_reward(
    unit: FloatArray, members: Sequence[FloatArray], clients: int, prior: Prior
) -> float:
    """Return the score of joining these members minus that of being alone, term by term."""
    s, s0, n = 1 / prior.sigma, 1 / prior.sigma0, len(members)
    counted = n if prior.popularity_clip is None else min(n, prior.popularity_clip)
    joined = own = known = 0.0
    for i, w in enumerate(unit.tolist()):
        g = s * math.fsum(float(member[i]) for member in members)
        joined += (s * w + g) ** 2
        own += (s * w) ** 2
        known += g**2
    score = joined / (s + s0 + s * n) - known / (s0 + s * n) - own / (s + s0)
    return score + prior.popularity_weight * math.log(counted / (clients - counted))


def brute_force_score(existing: Float64Array, new: Float64Array) -> float:
    """Return the best total reward over all injective maps to columns and new units."""
    rows, columns = existing.shape
    table = np.hstack([existing, np.broadcast_to(new, (rows, len(new)))]).tolist()
    return max(
        math.fsum(table[row][column] for row, column in enumerate(choice))
        for choice in itertools.permutations(range(columns + len(new)), rows)
    )


def step_score(problem: StepProblem, targets: IntArray) -> float:
    """Return the total reward of targets, which are columns or NEW."""
    joined = [(unit, column) for unit, column in enumerate(targets.tolist()) if column != NEW]
    added = len(targets) - len(joined)
    return math.fsum(problem.existing[unit, column] for unit, column in joined) + math.fsum(
        problem.new[:added].tolist()
    )


def is_sound(matching: GroupMatching) -> bool:
    """Return whether every client unit has its own global unit and every global unit an owner."""
    owned: set[int] = set()
    for assignment in matching.assignments:
        found = assignment.indices.tolist()
        if len(set(found)) < len(found) or assignment.width != matching.width:
            return False
        owned |= set(found)
    return owned == set(range(matching.width))
