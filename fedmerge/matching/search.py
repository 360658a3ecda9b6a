"""The search over clients: place every one, then revisit them until nothing changes."""

from collections.abc import Callable, Sequence

import numpy as np

from fedmerge.errors import MatchingError
from fedmerge.matching.clients import ClientUnits, client_units
from fedmerge.matching.rows import row_chunks, row_products, row_squares
from fedmerge.matching.slots import Slots
from fedmerge.matching.values import (
    GroupMatching,
    Prior,
    SearchOptions,
    Shortcuts,
    TooWide,
    UnitFeatures,
)
from fedmerge.matching.visits import Visitor
from fedmerge.types.arrays import Float64Array
from fedmerge.types.assignments import Assignment

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
    order = sorted(range(len(clients)), key=lambda client: -clients[client].features.count)
    slots = Slots(clients, clients[order[0]].features.count)
    visitor = Visitor(clients, slots, prior, options, max_width=max_width, shortcuts=shortcuts)
    for done, client in enumerate(order):
        progress(done / (2 * len(order)))
        visitor.visit(client)
        if is_hopeless(slots.width):
            raise TooWide
    sweeps, changed = 0, True
    while changed and sweeps < options.sweeps:
        sweeps += 1
        changed = not shortcuts.stop
        for done, client in enumerate(rng.permutation(len(clients)).tolist()):
            progress(0.5 + done / (2 * len(order)) if sweeps == 1 else 1.0)
            changed |= visitor.visit(client)
    assignments = _number(slots, order)
    squares = row_squares(slots.sums[:, : units[0].weights.shape[1]])  # without tie-breakers
    return GroupMatching(
        assignments,
        assignments[0].width,
        sweeps,
        _scatter(clients, slots, squares),
        _similarities(clients, slots, squares),
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


def _number(slots: Slots, order: Sequence[int]) -> tuple[Assignment, ...]:
    """Return the clients' assignments, slots numbered by first owner in order and its units."""
    numbers = np.full(slots.capacity, -1, dtype=np.int64)
    width = 0
    for client in order:
        homes = slots.homes[client]
        fresh = homes[numbers[homes] < 0]
        numbers[fresh] = np.arange(width, width + len(fresh))
        width += len(fresh)
    return tuple(Assignment(numbers[homes], width) for homes in slots.homes)


def _scatter(clients: Sequence[ClientUnits], slots: Slots, squares: Float64Array) -> float:
    """Return sum |w - mean of its global unit|² / sum |w|² = 1 - (sum of |sum|²/n) / sum |w|²."""
    total = sum(client.total for client in clients)
    if total == 0:
        return 0.0
    kept = float((squares / np.maximum(slots.counts, 1)).sum())
    return max(0.0, 1 - kept / total)


def _similarities(
    clients: Sequence[ClientUnits], slots: Slots, squares: Float64Array
) -> tuple[Float64Array, ...]:
    """Return per client (units,) the cosine of each unit with the mean of its fellow owners.

    With s the sum of all owners it is that of w and s - w: (w·s - |w|²) ÷ (|w|·|s - w|). NaN where
    a unit has its global unit alone, or where one of the two is 0.
    """
    found = []
    for client, homes in zip(clients, slots.homes, strict=True):
        weights, own = client.features.weights, client.features.squares
        products = np.empty(len(weights))
        for rows in row_chunks(*weights.shape):
            sums = slots.sums[homes[rows], : weights.shape[1]]
            products[rows] = row_products(weights[rows], sums)
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are hardly any
            others = np.maximum(squares[homes] - 2 * products + own, 0.0)
        norms = np.where(slots.counts[homes] > 1, np.sqrt(own) * np.sqrt(others), 0.0)
        cosines = np.full(len(weights), np.nan)
        np.divide(products - own, norms, out=cosines, where=norms > 0)
        found.append(np.clip(cosines, -1.0, 1.0))
    return tuple(found)
