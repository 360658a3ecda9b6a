"""Match the groups of a plan one after another, as deep as the budget allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.graph import count_parameters
from fedmerge.matching import (
    GroupMatching,
    Prior,
    SearchOptions,
    UnitFeatures,
    keep_apart,
    match_units,
    prior_at_threshold,
)
from fedmerge.types.assignments import Assignment
from fedmerge.types.clients import Client
from fedmerge.types.plans import Group, Plan, equal_widths
from fedmerge.types.progress import Progress
from fedmerge.units import GatheredUnits, TieBreaker, gather_units
from fedmerge.workflow.options import Dials

LOWEST_THRESHOLD = 1e-3
HIGHEST_THRESHOLD = 1 - 1e-6  # for groups that can't grow; at 1 the variance σ² would vanish
BUDGET_TRIES = 12


@dataclass(frozen=True)
class Problem:
    """The clients to be matched, what is known of them, and the search's settings."""

    clients: Sequence[Client]
    plan: Plan
    client_widths: Sequence[Mapping[str, int]]
    dials: Dials
    search: SearchOptions
    ties: TieBreaker
    seed: int
    kept_parameters: int = 0

    @property
    def widest(self) -> dict[str, int]:
        """The widest client's width of every group."""
        return {
            group.name: max(widths[group.name] for widths in self.client_widths)
            for group in self.plan.groups
        }

    def parameters(self, widths: Mapping[str, int]) -> int:
        """Return the size of a net with these widths, tied ones made equal."""
        tied = equal_widths(widths, self.plan.same_width)
        return self.kept_parameters + count_parameters(self.plan, tied)


@dataclass(frozen=True)
class Solution:
    """The matching of every group, and the threshold that gave it."""

    matchings: Mapping[str, GroupMatching]
    threshold: float | None


def solve(problem: Problem, progress: Progress) -> Solution:
    """Return the matching of every group within the size budget."""
    growth, threshold = problem.dials.max_growth, problem.dials.threshold
    if growth is None or growth == 1 or threshold is None:
        matchings = _match_groups(problem, threshold, progress, capped=growth == 1)
        assert matchings is not None
        return Solution(matchings, threshold)
    return _search_threshold(problem, growth, threshold, progress)


def _search_threshold(
    problem: Problem, growth: float, threshold: float, progress: Progress
) -> Solution:
    """Return the matching at the highest threshold up to the given one whose model fits.

    Bisection on log(t/(1−t)) down to `LOWEST_THRESHOLD`; if not even that fits, no group grows.
    """
    budget = int(growth * problem.parameters(problem.widest))
    fits = _match_groups(problem, threshold, progress, budget=budget)
    if fits is not None:
        return Solution(fits, threshold)
    best: Solution | None = None
    low, high = _logit(LOWEST_THRESHOLD), _logit(min(threshold, HIGHEST_THRESHOLD))
    middle = low
    for _ in range(BUDGET_TRIES - 1):
        tried = 1 / (1 + math.exp(-middle))
        fits = _match_groups(problem, tried, progress, budget=budget)
        if fits is not None:
            best, low = Solution(fits, tried), middle
        elif middle == low:
            break
        else:
            high = middle
        middle = (low + high) / 2
    if best is not None:
        return best
    capped = _match_groups(problem, LOWEST_THRESHOLD, progress, capped=True)
    assert capped is not None
    return Solution(capped, LOWEST_THRESHOLD)


def _match_groups(
    problem: Problem,
    threshold: float | None,
    progress: Progress,
    *,
    capped: bool = False,
    budget: int | None = None,
) -> dict[str, GroupMatching] | None:
    """Match group after group in forward order; None as soon as the model exceeds the budget."""
    matchings: dict[str, GroupMatching] = {}
    placed: list[dict[str, Assignment]] = [{} for _ in problem.clients]
    widths = problem.widest
    for number, group in enumerate(problem.plan.groups):
        progress("matching", number, len(problem.plan.groups))
        units = [
            gather_units(
                client, problem.plan, group.name, widths=own, placed=place, ties=problem.ties
            )
            for client, own, place in zip(
                problem.clients, problem.client_widths, placed, strict=True
            )
        ]
        rng = np.random.default_rng([problem.seed, number])
        matching = _match_group(problem, group, units, threshold, capped=capped, rng=rng)
        matchings[group.name] = matching
        for place, assignment in zip(placed, matching.assignments, strict=True):
            place[group.name] = assignment
        widths[group.name] = matching.width
        if budget is not None and problem.parameters(widths) > budget:
            return None
    progress("matching", len(problem.plan.groups), len(problem.plan.groups))
    return matchings


def _match_group(
    problem: Problem,
    group: Group,
    units: Sequence[GatheredUnits],
    threshold: float | None,
    *,
    capped: bool,
    rng: np.random.Generator,
) -> GroupMatching:
    can_grow = group.can_grow and not capped
    if threshold == 1 and can_grow:
        return keep_apart([len(client.weights) for client in units])
    return match_units(
        [UnitFeatures(client.weights, client.ties) for client in units],
        _prior(problem.dials, units, threshold),
        problem.search,
        max_width=None if can_grow else problem.widest[group.name],
        rng=rng,
    )


def _prior(dials: Dials, units: Sequence[GatheredUnits], threshold: float | None) -> Prior:
    """Return fixed variances, or σ0² = t·V and σ² = (1−t)·V with V the weights' second moment."""
    if threshold is None:
        assert dials.sigma is not None
        assert dials.sigma0 is not None
        return Prior(
            dials.sigma,
            dials.sigma0,
            dials.gamma,
            popularity_weight=dials.popularity_weight,
            popularity_clip=dials.popularity_clip,
        )
    entries = sum(client.entries for client in units)
    moment = sum(client.squares for client in units) / max(1, entries)
    return prior_at_threshold(min(threshold, HIGHEST_THRESHOLD), moment, gamma=dials.gamma)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
