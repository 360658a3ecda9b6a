"""Merge clients by their weights alone: group after group, as deep as the budget allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from fedmerge.matching import (
    GroupMatching,
    Prior,
    SearchOptions,
    TooWide,
    UnitFeatures,
    keep_apart,
    match_inside,
    match_units,
    prior_at_threshold,
)
from fedmerge.matching.features import GatheredUnits, TieBreaker, gather_units
from fedmerge.merging.options import Dials
from fedmerge.merging.result import ALIKE, Merge, Solution, average, merge_of
from fedmerge.merging.session import Session
from fedmerge.values.arrays import FloatArray
from fedmerge.values.plans import neighbours
from fedmerge.values.wording import Progress, whole_percent

ENOUGH_ALIKE = 0.25  # share of units with matching weights from which a deep net may be merged so
SHALLOW = 2  # hidden groups up to which units that hardly match do little harm
FEWEST = 16  # matched units from which on it can be told from chance
HIGHEST_THRESHOLD = 1 - 1e-6  # for groups with a limit; at 1 the variance σ² would vanish
BUDGET_TRIES = 12  # matchings of the whole plan at most
# A try whose clients, each placed once, are so many times wider than what fits is given up: sweeps
# hardly make it narrower, and its time grows with the square of the clients.
HOPELESS = 2
TRAINED_APART = 0.1  # share of units at the same places that one pass finds at most
LIMIT_BITS = 30  # halvings of the range of limits, beyond any width's resolution


Matcher: TypeAlias = Callable[[Sequence[UnitFeatures]], GroupMatching]
Responses: TypeAlias = Mapping[str, FloatArray]  # group → (units, columns), of length 1 about 0


@dataclass(frozen=True)
class Compared:
    """What units are compared by besides their weights: responses to probes, if there are any."""

    responses: Sequence[Responses] = ()  # of every client's units; none: weights alone
    share: float = 0.0  # of the responses in what two units have in common


BY_WEIGHTS_ALONE = Compared()
NO_MATCHERS: Mapping[str, Matcher] = {}


def merge_by_weights(
    session: Session, progress: Progress, *, only_if_shared: bool = False
) -> Merge:
    """Match every group by weights; clients of one start that stayed there are averaged instead.

    With `only_if_shared`, one pass tells clients that were trained apart, and that is all.
    """
    solution = _within_budget(session, progress)
    share = in_place(solution.matchings)
    if not only_if_shared or share is None or share >= TRAINED_APART:
        solution = _refined(session, solution, progress)
    merge = replace(merge_of(session, solution), in_place=in_place(solution.matchings))
    if merge.stays_in_place and merge.growth > 1 and _leaves_units_open(session):
        return replace(average(session), in_place=merge.in_place)
    return merge


_REMEDIES = {True: "let the clients be run", False: "give the model's code (`model`)"}


def with_doubt(merge: Merge) -> Merge:
    """Return a merge of files alone, with a warning where it is likely to be of no use.

    In a deep net, errors of units that hardly match add up from layer to layer; nothing has been
    run that would tell.
    """
    share = merge.alike_share
    if share is None or share >= ENOUGH_ALIKE or len(merge.groups) <= SHALLOW:
        return merge
    remedy = _REMEDIES[merge.session.can_run]
    doubt = (
        f"the merge is likely worse than its clients, and may be useless: {whole_percent(share)} "
        f"of the units in {len(merge.groups)} hidden layers have matching weights (a cosine above "
        f"{ALIKE:g}); {remedy}, so that units are compared by what they do"
    )
    return replace(merge, warnings=(*merge.warnings, doubt))


def _leaves_units_open(session: Session) -> bool:
    """Return whether units may be averaged by their places: the user did not say how to match."""
    options = session.options
    wishes = (options.preset, options.match_threshold, options.gamma, options.sigma, options.lead)
    is_said = any(wish is not None for wish in wishes)
    return options.method == "fedma" and not is_said and session.is_equally_wide


def in_place(matchings: Mapping[str, GroupMatching]) -> float | None:
    """Return the share of units matched with the first client's that stand at the same place there.

    Weights tell it: they are near each other only where training began alike. None if units are
    too few.
    """
    pairs = same = 0
    for matching in matchings.values():
        first, *others = (numbers.tolist() for numbers in matching.numbers)
        places = {unit: place for place, unit in enumerate(first)}
        found = [[places.get(unit) for unit in units] for units in others]
        pairs += sum(place is not None for own in found for place in own)
        same += sum(place == number for own in found for number, place in enumerate(own))
    return same / pairs if pairs >= FEWEST else None


def solve(session: Session, progress: Progress) -> Solution:
    """Return the matching of every group within the size budget, refined."""
    return _refined(session, _within_budget(session, progress), progress)


def _within_budget(session: Session, progress: Progress) -> Solution:
    """Return the matching by one pass over the groups that fits the size budget."""
    growth = session.dials.max_growth
    if growth == 1:
        return _solve_within(session, 1.0, progress)
    budget = None if growth is None else session.budget(growth)
    free = match_groups(session, {}, progress, budget=budget)
    if free is not None:
        return Solution(free, None)
    assert budget is not None
    return _search_limit(session, budget, progress)


def _search_limit(session: Session, budget: int, progress: Progress) -> Solution:
    """Return the matching at the highest common limit on the groups' growth that fits.

    Every group may grow to the same multiple of its widest client; within it the units that
    match worst become new ones. Bisection starts at the limit that fits even if every group
    takes all it may, which is the answer where every group does.
    """
    low = bisect(
        lambda limit: session.parameters(session.limits(limit)) <= budget,
        1.0,
        float(len(session.aligned)),
    )
    best = _solve_within(session, low, progress)
    high = float(len(session.aligned))
    for _ in range(BUDGET_TRIES):
        if best.fills(session.limits(low)):
            break
        middle = (low + high) / 2
        if session.limits(middle) == session.limits(low):
            break
        fits = match_groups(session, session.limits(middle), progress, budget=budget)
        if fits is None:
            high = middle
        else:
            best, low = Solution(fits, middle), middle
    return best


def _solve_within(session: Session, limit: float, progress: Progress) -> Solution:
    matchings = match_groups(session, session.limits(limit), progress)
    assert matchings is not None
    return Solution(matchings, limit)


def bisect(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest number found that fits, between a fitting and a misfitting one."""
    for _ in range(LIMIT_BITS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def match_groups(
    session: Session,
    limits: Mapping[str, int],
    progress: Progress,
    *,
    budget: int | None = None,
    compared: Compared = BY_WEIGHTS_ALONE,
    matchers: Mapping[str, Matcher] = NO_MATCHERS,
) -> dict[str, GroupMatching] | None:
    """Match group after group in forward order; None as soon as the model exceeds the budget.

    `limits` are the largest widths, for groups that have any, and
    `matchers` the ways to match those that have one of their own.
    """
    matchings: dict[str, GroupMatching] = {}
    widths = dict(session.widest)
    for number, group in enumerate(session.plan.groups):
        limit = limits.get(group.name) if group.can_grow else session.widest[group.name]
        share = _part(progress, "matching", number, len(session.plan.groups))
        is_hopeless = partial(_is_hopeless, session, group.name, dict(widths), budget)
        try:
            matchings[group.name] = match_group(
                session,
                number,
                matchings,
                limit,
                compared=compared,
                matcher=matchers.get(group.name),
                progress=share,
                is_hopeless=is_hopeless,
            )
        except TooWide:
            return None
        widths[group.name] = matchings[group.name].width
        if budget is not None and session.parameters(widths) > budget:
            return None
    progress("matching", len(session.plan.groups), len(session.plan.groups))
    return matchings


def _is_hopeless(
    session: Session, group: str, others: Mapping[str, int], budget: int | None, width: int
) -> bool:
    """Return whether even a part of a group's width exceeds the budget, others as they are."""
    part = width // HOPELESS
    if budget is None or part <= session.widest[group]:
        return False
    return session.parameters({**others, group: part}) > budget


def _refined(session: Session, solution: Solution, progress: Progress) -> Solution:
    """Match every group again, now that all others are placed, until nothing changes.

    Outgoing and recurrent weights then count too: the coupled problem that the paper leaves open.
    No group grows where the size is limited. A group around which nothing changed would be matched
    as before.
    """
    plan, matchings = session.plan, dict(solution.matchings)
    total = session.dials.refine * len(plan.groups)
    changes = dict.fromkeys(matchings, 0)  # how often each group's assignments changed
    seen: dict[str, list[int]] = {}  # the changes around each group when it was last matched
    for done in range(total):
        number = done % len(plan.groups)
        group = plan.groups[number]
        around = [changes[name] for name in neighbours(plan, group.name)]
        if seen.get(group.name) == around:
            continue
        seen[group.name] = around
        is_limited = session.dials.max_growth is not None or not group.can_grow
        limit = matchings[group.name].width if is_limited else None
        share = _part(progress, "refining", done, total)
        again = match_group(session, number, matchings, limit, outgoing=True, progress=share)
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
    session: Session,
    number: int,
    matchings: Mapping[str, GroupMatching],
    limit: int | None,
    *,
    outgoing: bool = False,
    compared: Compared = BY_WEIGHTS_ALONE,
    matcher: Matcher | None = None,
    progress: Callable[[float], None],
    is_hopeless: Callable[[int], bool] = lambda width: False,
) -> GroupMatching:
    """Match one group's units, given the matchings of others, to at most `limit` global units.

    `TooWide` is raised as soon as the width is hopeless.
    """
    group = session.plan.groups[number].name
    outer = session.plan.inside.get(group)
    if session.dials.threshold == 1 and limit is None and outer is None:
        return keep_apart([own[group] for own in session.client_widths])
    gather = partial(_gather, session, group, matchings, compared=compared, outgoing=outgoing)
    features, entries = gather(ties=None)
    if any(client.twins.any() for client in features):
        del features  # before they are gathered once more
        features, entries = gather(ties=TieBreaker(scale=session.options.tie_breaker))
    if matcher is not None:
        return matcher(features)
    if session.dials.threshold == 1 and limit is None:
        match: Matcher = _kept_apart
    else:
        match = partial(
            match_units,
            prior=_prior(session.dials, features, entries),
            options=search_options(session),
            max_width=limit,
            rng=np.random.default_rng([session.options.seed, number]),
            progress=progress,
            is_hopeless=is_hopeless,
        )
    found = (
        match(features)
        if outer is None
        else match_inside(features, matchings[outer].assignments, match)
    )
    return replace(found, threshold=session.dials.threshold)


def _kept_apart(units: Sequence[UnitFeatures]) -> GroupMatching:
    return keep_apart([own.count for own in units])


def _gather(
    session: Session,
    group: str,
    matchings: Mapping[str, GroupMatching],
    *,
    ties: TieBreaker | None,
    compared: Compared,
    outgoing: bool,
) -> tuple[list[UnitFeatures], int]:
    """Return the features of one group's units for every client, and how many numbers they own."""

    def gather(number: int) -> GatheredUnits:
        return gather_units(
            session.aligned[number],
            session.plan,
            group,
            widths=session.client_widths[number],
            placed={name: matching.assignments[number] for name, matching in matchings.items()},
            ties=ties,
            outgoing=outgoing,
        )

    units = [gather(number) for number in range(len(session.aligned))]
    responses = [known[group] for known in compared.responses if group in known]
    if len(responses) < len(units):
        features = [UnitFeatures(client.weights, client.ties) for client in units]
        return features, sum(client.entries for client in units)
    weights = _scaled_weights([client.weights for client in units], compared.share)
    share = np.float32(np.sqrt(compared.share))
    features = [
        UnitFeatures(np.concatenate([share * answered, rows], axis=1), client.ties)
        for answered, rows, client in zip(responses, weights, units, strict=True)
    ]
    return features, sum(client.weights.size for client in features)


def search_options(session: Session) -> SearchOptions:
    """Return how the assignments of a session's clients are searched for."""
    dials = session.dials
    return SearchOptions(
        sweeps=dials.sweeps,
        solver=session.options.solver,
        unit_cap=dials.unit_cap,
        device=session.device,
    )


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
