"""Match the groups of a plan one after another, as deep as the budget allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from fedmerge.graph import count_parameters
from fedmerge.matching import (
    GroupMatching,
    Prior,
    SearchOptions,
    TooWide,
    UnitFeatures,
    keep_apart,
    match_units,
    prior_at_threshold,
)
from fedmerge.types.arrays import FloatArray
from fedmerge.types.clients import Client
from fedmerge.types.plans import Plan, equal_widths, neighbours
from fedmerge.types.progress import Progress
from fedmerge.units import GatheredUnits, TieBreaker, gather_units
from fedmerge.workflow.options import Dials

HIGHEST_THRESHOLD = 1 - 1e-6  # for groups with a limit; at 1 the variance σ² would vanish
BUDGET_TRIES = 12  # matchings of the whole plan at most
# A try whose clients, each placed once, are so many times wider than what fits is given up: sweeps
# hardly make it narrower, and its time grows with the square of the clients.
HOPELESS = 2
LIMIT_BITS = 30  # halvings of the range of limits, beyond any width's resolution


Responses: TypeAlias = Mapping[str, FloatArray]  # group → (units, columns), of length 1 about 0


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
    responses: Sequence[Responses] = ()  # of every client's units to probes; none: weights alone
    response_share: float = 0.0  # of the responses in what two units have in common

    @cached_property
    def widest(self) -> dict[str, int]:
        """The widest client's width of every group."""
        return {
            group.name: max(widths[group.name] for widths in self.client_widths)
            for group in self.plan.groups
        }

    def limits(self, growth: float) -> dict[str, int]:
        """Return the largest width of every group that can grow, at most this much wider."""
        return {
            group.name: int(growth * self.widest[group.name])
            for group in self.plan.groups
            if group.can_grow
        }

    def parameters(self, widths: Mapping[str, int]) -> int:
        """Return the size of a net with these widths, tied ones made equal."""
        tied = equal_widths({**self.widest, **widths}, self.plan.same_width)
        return self.kept_parameters + count_parameters(self.plan, tied)


@dataclass(frozen=True)
class Solution:
    """The matching of every group, and the limit on the groups' growth that gave it."""

    matchings: Mapping[str, GroupMatching]
    limit: float | None  # the largest width ÷ the widest client's; None: no limit was needed

    def fills(self, limits: Mapping[str, int]) -> bool:
        """Return whether every group is as wide as it may be."""
        return all(self.matchings[group].width == width for group, width in limits.items())


def solve(problem: Problem, progress: Progress) -> Solution:
    """Return the matching of every group within the size budget, refined."""
    return _refined(problem, _within_budget(problem, progress), progress)


def _within_budget(problem: Problem, progress: Progress) -> Solution:
    """Return the matching by one pass over the groups that fits the size budget."""
    growth = problem.dials.max_growth
    if growth == 1:
        return _solve_within(problem, 1.0, progress)
    budget = None if growth is None else int(growth * problem.parameters(problem.widest))
    free = match_groups(problem, {}, progress, budget=budget)
    if free is not None:
        return Solution(free, None)
    assert budget is not None
    return _search_limit(problem, budget, progress)


def _search_limit(problem: Problem, budget: int, progress: Progress) -> Solution:
    """Return the matching at the highest common limit on the groups' growth that fits.

    Every group may grow to the same multiple of its widest client; within it the units that
    match worst become new ones. Bisection starts at the limit that fits even if every group
    takes all it may, which is the answer where every group does.
    """
    low = bisect(
        lambda limit: problem.parameters(problem.limits(limit)) <= budget,
        1.0,
        float(len(problem.clients)),
    )
    best = _solve_within(problem, low, progress)
    high = float(len(problem.clients))
    for _ in range(BUDGET_TRIES):
        if best.fills(problem.limits(low)):
            break
        middle = (low + high) / 2
        if problem.limits(middle) == problem.limits(low):
            break
        fits = match_groups(problem, problem.limits(middle), progress, budget=budget)
        if fits is None:
            high = middle
        else:
            best, low = Solution(fits, middle), middle
    return best


def _solve_within(problem: Problem, limit: float, progress: Progress) -> Solution:
    matchings = match_groups(problem, problem.limits(limit), progress)
    assert matchings is not None
    return Solution(matchings, limit)


def bisect(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest number found that fits, between a fitting and a misfitting one."""
    for _ in range(LIMIT_BITS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def match_groups(
    problem: Problem,
    limits: Mapping[str, int],
    progress: Progress,
    *,
    budget: int | None = None,
) -> dict[str, GroupMatching] | None:
    """Match group after group in forward order; None as soon as the model exceeds the budget.

    `limits` are the largest widths, for groups that have any.
    """
    matchings: dict[str, GroupMatching] = {}
    widths = dict(problem.widest)
    for number, group in enumerate(problem.plan.groups):
        limit = limits.get(group.name) if group.can_grow else problem.widest[group.name]
        share = _part(progress, "matching", number, len(problem.plan.groups))
        is_hopeless = partial(_is_hopeless, problem, group.name, dict(widths), budget)
        try:
            matchings[group.name] = match_group(
                problem, number, matchings, limit, progress=share, is_hopeless=is_hopeless
            )
        except TooWide:
            return None
        widths[group.name] = matchings[group.name].width
        if budget is not None and problem.parameters(widths) > budget:
            return None
    progress("matching", len(problem.plan.groups), len(problem.plan.groups))
    return matchings


def _is_hopeless(
    problem: Problem, group: str, others: Mapping[str, int], budget: int | None, width: int
) -> bool:
    """Return whether even a part of a group's width exceeds the budget, others as they are."""
    part = width // HOPELESS
    if budget is None or part <= problem.widest[group]:
        return False
    return problem.parameters({**others, group: part}) > budget


def _refined(problem: Problem, solution: Solution, progress: Progress) -> Solution:
    """Match every group again, now that all others are placed, until nothing changes.

    Outgoing and recurrent weights then count too: the coupled problem that the paper leaves open.
    No group grows where the size is limited. A group around which nothing changed would be matched
    as before.
    """
    plan, matchings = problem.plan, dict(solution.matchings)
    total = problem.dials.refine * len(plan.groups)
    changes = dict.fromkeys(matchings, 0)  # how often each group's assignments changed
    seen: dict[str, list[int]] = {}  # the changes around each group when it was last matched
    for done in range(total):
        number = done % len(plan.groups)
        group = plan.groups[number]
        around = [changes[name] for name in neighbours(plan, group.name)]
        if seen.get(group.name) == around:
            continue
        seen[group.name] = around
        is_limited = problem.dials.max_growth is not None or not group.can_grow
        limit = matchings[group.name].width if is_limited else None
        share = _part(progress, "refining", done, total)
        again = match_group(problem, number, matchings, limit, outgoing=True, progress=share)
        changes[group.name] += not is_same(again, matchings[group.name])
        matchings[group.name] = again
    return Solution(matchings, solution.limit)


def _part(progress: Progress, step: str, done: int, total: int) -> Callable[[float], None]:
    """Return who hears the share done of the next part of a step."""
    return lambda share: progress(step, done + share, total)


def is_same(one: GroupMatching, other: GroupMatching) -> bool:
    """Return whether two matchings assign every unit alike."""
    pairs = zip(one.assignments, other.assignments, strict=True)
    return all(np.array_equal(a.indices, b.indices) for a, b in pairs)


def match_group(
    problem: Problem,
    number: int,
    matchings: Mapping[str, GroupMatching],
    limit: int | None,
    *,
    outgoing: bool = False,
    progress: Callable[[float], None],
    is_hopeless: Callable[[int], bool] = lambda width: False,
) -> GroupMatching:
    """Match one group's units, given the matchings of others, to at most `limit` global units.

    `TooWide` is raised as soon as the width is hopeless.
    """
    group = problem.plan.groups[number].name
    if problem.dials.threshold == 1 and limit is None:
        return keep_apart([own[group] for own in problem.client_widths])
    gather = partial(_gather, problem, group, matchings, outgoing=outgoing)
    features, entries = gather(ties=None)
    if any(client.twins.any() for client in features):
        del features  # before they are gathered once more
        features, entries = gather(ties=problem.ties)
    found = match_units(
        features,
        _prior(problem.dials, features, entries),
        problem.search,
        max_width=limit,
        rng=np.random.default_rng([problem.seed, number]),
        progress=progress,
        is_hopeless=is_hopeless,
    )
    return replace(found, threshold=problem.dials.threshold)


def _gather(
    problem: Problem,
    group: str,
    matchings: Mapping[str, GroupMatching],
    *,
    ties: TieBreaker | None,
    outgoing: bool,
) -> tuple[list[UnitFeatures], int]:
    """Return the features of one group's units for every client, and how many numbers they own."""

    def gather(number: int) -> GatheredUnits:
        return gather_units(
            problem.clients[number],
            problem.plan,
            group,
            widths=problem.client_widths[number],
            placed={name: matching.assignments[number] for name, matching in matchings.items()},
            ties=ties,
            outgoing=outgoing,
        )

    units = [gather(number) for number in range(len(problem.clients))]
    if not all(group in own for own in problem.responses) or not problem.responses:
        features = [UnitFeatures(client.weights, client.ties) for client in units]
        return features, sum(client.entries for client in units)
    weights = _scaled_weights([client.weights for client in units], problem.response_share)
    share = np.float32(np.sqrt(problem.response_share))
    features = [
        UnitFeatures(np.concatenate([share * own[group], rows], axis=1), client.ties)
        for own, rows, client in zip(problem.responses, weights, units, strict=True)
    ]
    return features, sum(client.weights.size for client in features)


def _scaled_weights(weights: Sequence[FloatArray], response_share: float) -> list[FloatArray]:
    """Return weights whose mean square length over all units is what responses leave of 1."""
    rows = sum(len(own) for own in weights)
    square = sum(float(np.square(own, dtype=np.float64).sum()) for own in weights) / max(1, rows)
    scale = np.sqrt((1 - response_share) / square) if square > 0 else 0.0
    return [(scale * own).astype(np.float32) for own in weights]


def _prior(dials: Dials, features: Sequence[UnitFeatures], entries: int) -> Prior:
    """Return fixed variances, or σ0² = t·V and σ² = (1−t)·V with V the weights' second moment."""
    if dials.threshold is None:
        assert dials.sigma is not None
        assert dials.sigma0 is not None
        return Prior(
            dials.sigma,
            dials.sigma0,
            dials.gamma,
            popularity_weight=dials.popularity_weight,
            popularity_clip=dials.popularity_clip,
        )
    moment = sum(float(client.squares.sum()) for client in features) / max(1, entries)
    return prior_at_threshold(min(dials.threshold, HIGHEST_THRESHOLD), moment, gamma=dials.gamma)
