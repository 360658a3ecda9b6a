"""Match one group's units: two equally wide clients at once, others by sweeps; or to leaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from fedmerge.errors import MatchingError
from fedmerge.matching.assignment import NEW, StepProblem, best_step, solve
from fedmerge.matching.scores import (
    ClientUnits,
    GroupMatching,
    Prior,
    Products,
    SearchOptions,
    Shortcuts,
    SolverName,
    TooWide,
    UnitFeatures,
    client_units,
    existing_rewards,
    feature_parts,
    multiply,
    new_rewards,
    row_chunks,
    row_products,
)
from fedmerge.matching.sweeps import sweep_units
from fedmerge.values.arrays import Float64Array, FloatArray, IntArray
from fedmerge.values.plans import Assignment

PAIR = 2
# Rewards are differences of the products; below this share of sigma float32 products drown them.
EXACT_BELOW = 1e-4  # sigma/(sigma+sigma0)


def match_units(
    units: Sequence[UnitFeatures],
    prior: Prior,
    options: SearchOptions,
    *,
    max_width: int | None,
    rng: np.random.Generator,
    shortcuts: Shortcuts = Shortcuts(),  # noqa: B008, a frozen value
    progress: Callable[[float], None] = lambda share: None,
    is_hopeless: Callable[[int], bool] = lambda width: False,
) -> GroupMatching:
    """Match one group's units over all clients, each (units, features), by maximum a posteriori.

    The widest client comes first, the others once in their order, then sweeps in random order
    until one changes nothing. Global units are numbered by their first owner in that order, and by
    its units: the widest client keeps its numbering. `progress` hears the share of the visits that
    are made at least. Where the global units of so far are hopelessly many, `TooWide` is raised.
    """
    exact = prior.sigma < EXACT_BELOW * (prior.sigma + prior.sigma0)
    clients = [client_units(features, exact=exact) for features in units]
    _check(clients, max_width)
    if shortcuts.pair and is_pair(clients):
        return match_pair(
            clients,
            prior,
            options,
            max_width=max_width,
            shortcuts=shortcuts,
            is_hopeless=is_hopeless,
        )
    return sweep_units(
        clients,
        prior,
        options,
        max_width=max_width,
        rng=rng,
        shortcuts=shortcuts,
        progress=progress,
        is_hopeless=is_hopeless,
    )


def keep_apart(counts: Sequence[int]) -> GroupMatching:
    """Return the matching of clients with these unit counts side by side, nothing matched."""
    width = sum(counts)
    starts = np.cumsum([0, *counts[:-1]])
    assignments = tuple(
        Assignment(np.arange(start, start + count, dtype=np.int64), width)
        for start, count in zip(starts, counts, strict=True)
    )
    return GroupMatching(assignments, width, sweeps=0, scatter=0.0)


def _check(clients: Sequence[ClientUnits], max_width: int | None) -> None:
    """Refuse what has no admissible matching."""
    assert clients, "no clients"
    lengths = {c.features.weights.shape[1:] + c.features.ties.shape[1:] for c in clients}
    assert len(lengths) == 1, "clients with different features"
    for number, client in enumerate(clients, start=1):
        if not np.isfinite(client.squares).all():
            raise MatchingError(
                f"client {number}: a unit's weights are not finite, or too large to be squared",
                "look for NaN, infinite or very large weights in that client's file",
            )
    widest = max(client.features.count for client in clients)
    if max_width is not None and max_width < widest:
        raise MatchingError(
            f"a global width of at most {max_width} cannot hold a client of {widest} units",
            "allow at least the widest client's width",
        )


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
