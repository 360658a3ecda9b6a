"""The mathematics of the matching in plain loops: the other side of the comparison.

One unit and one global unit at a time, in float64, every new unit a column of its own, scipy's
solver, nothing kept from one visit to the next. It shares no code with `fedmerge.matching` beyond
the values that go in and come out, and must give the same assignments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedmerge.matching import GroupMatching, Prior, SearchOptions, UnitFeatures
from fedmerge.merging import by_weights
from fedmerge.values import Assignment, Float64Array


@dataclass
class GlobalUnit:
    """The client units that were matched with each other, at most one of each client."""

    members: dict[int, int] = field(default_factory=dict)  # client → its unit


def match_units(
    units: Sequence[UnitFeatures],
    prior: Prior,
    options: SearchOptions,
    *,
    max_width: int | None,
    rng: np.random.Generator,
    progress: Callable[[float], None] = lambda share: None,
) -> GroupMatching:
    """Match one group: widest client first, the others once, then sweeps until nothing changes."""
    assert options.unit_cap is None, "the paper's cap has no plain version"
    search = PlainSearch(units, prior, options.min_gain, max_width)
    order = sorted(range(len(units)), key=lambda client: -units[client].count)
    for done, client in enumerate(order):
        progress(done / len(order))
        search.visit(client)
    sweeps, changed = 0, True
    while changed and sweeps < options.sweeps:
        sweeps += 1
        changed = False
        for client in rng.permutation(len(units)):
            changed = search.visit(int(client)) or changed
    assignments = search.numbered(order)
    return GroupMatching(assignments, assignments[0].width, sweeps, search.scatter())


@contextmanager
def plain_loops() -> Iterator[None]:
    """Match in plain loops whatever a workflow matches inside."""
    with mock.patch.object(by_weights, "match_units", match_units):
        yield


class PlainSearch:
    """The global units of one group, and one client's best step among them."""

    def __init__(
        self,
        units: Sequence[UnitFeatures],
        prior: Prior,
        min_gain: float,
        max_width: int | None,
    ) -> None:
        self._lengths = units[0].weights.shape[1]  # without tie-breakers
        self._rows = [
            np.hstack([client.weights, client.ties]).astype(np.float64) for client in units
        ]
        self._prior, self._min_gain, self._max_width = prior, min_gain, max_width
        self._s, self._s0 = 1 / prior.sigma, 1 / prior.sigma0
        self._global: list[GlobalUnit] = []

    def visit(self, client: int) -> bool:
        """Take a client out, give it its best step, and return whether anything changed."""
        known, current = self._without(client)
        is_placed = any(client in unit.members for unit in self._global)
        rewards = self._rewards(client, known)
        _, targets = linear_sum_assignment(rewards, maximize=True)
        targets = [min(int(column), len(known)) for column in targets]  # all new ones alike
        if is_placed and not self._is_better(client, rewards, current, targets):
            return False
        for unit in self._global:
            unit.members.pop(client, None)
        for row, column in enumerate(targets):
            if column < len(known):
                known[column].members[client] = row
            else:
                self._global.append(GlobalUnit({client: row}))
        self._global = [unit for unit in self._global if unit.members]
        return True

    def _without(self, client: int) -> tuple[list[GlobalUnit], list[int]]:
        """Return the global units with other members, and the client's column in them."""
        known = [unit for unit in self._global if set(unit.members) - {client}]
        current = [len(known)] * len(self._rows[client])
        for column, unit in enumerate(known):
            if client in unit.members:
                current[unit.members[client]] = column
        return known, current

    def _rewards(self, client: int, known: Sequence[GlobalUnit]) -> Float64Array:
        """Return (units, known + new) scores, one after another.

        |v+g|²/(s+S) - |g|²/S + popularity, and |v|²/(s+s0) + 2·log(gamma/J) - 2·log k.
        """
        rows = self._rows[client]
        room = len(rows)
        if known and self._max_width is not None:
            room = min(room, self._max_width - len(known))
        rewards = np.empty((len(rows), len(known) + room))
        for column, unit in enumerate(known):
            others = [pair for pair in unit.members.items() if pair[0] != client]
            g = np.zeros(rows.shape[1])
            for other, member in others:
                g += self._s * self._rows[other][member]
            alone = self._s0 + self._s * len(others)
            offset = self._popularity(len(others)) - float(g @ g) / alone
            for row in range(len(rows)):
                joined = self._s * rows[row] + g
                rewards[row, column] = float(joined @ joined) / (self._s + alone) + offset
        new = [self._new(rank) for rank in range(1, room + 1)]
        for row in range(len(rows)):
            base = self._base(rows[row])
            for place, reward in enumerate(new):
                rewards[row, len(known) + place] = base + reward
        return rewards

    def _base(self, row: Float64Array) -> float:
        """Return |v|²/(s+s0), what a unit scores alone."""
        return self._s**2 * float(row @ row) / (self._s + self._s0)

    def _popularity(self, members: int) -> float:
        clip = self._prior.popularity_clip
        counted = members if clip is None else min(members, clip)
        return self._prior.popularity_weight * math.log(counted / (len(self._rows) - counted))

    def _is_better(
        self, client: int, rewards: Float64Array, before: Sequence[int], after: Sequence[int]
    ) -> bool:
        """Return whether `after` beats `before` by the least gain, relative to what changed."""
        known = len(self._without(client)[0])
        gain = self._new_score(after.count(known)) - self._new_score(before.count(known))
        scale = 0.0
        for row, (old, found) in enumerate(zip(before, after, strict=True)):
            if old == found:
                continue
            base = self._base(self._rows[client][row])
            left = rewards[row, old] - base if old < known else 0.0
            joined = rewards[row, found] - base if found < known else 0.0
            gain += joined - left
            scale += base + abs(left) + abs(joined)
        return gain > self._min_gain * scale

    def _new_score(self, count: int) -> float:
        """Return what so many new units score together beyond |v|²/(s+s0)."""
        return sum(map(self._new, range(1, count + 1)))

    def _new(self, rank: int) -> float:
        """Return 2·log(gamma/J) - 2·log k, what the k-th new unit scores beyond |v|²/(s+s0)."""
        return 2 * math.log(self._prior.gamma / len(self._rows)) - 2 * math.log(rank)

    def numbered(self, order: Sequence[int]) -> tuple[Assignment, ...]:
        """Return the assignments, global units numbered by first owner in order and its units."""

        def first_owner(unit: GlobalUnit) -> tuple[int, int]:
            place, client = min((order.index(client), client) for client in unit.members)
            return place, unit.members[client]

        ranked = sorted(self._global, key=first_owner)
        indices = [np.empty(len(rows), dtype=np.int64) for rows in self._rows]
        for number, unit in enumerate(ranked):
            for client, row in unit.members.items():
                indices[client][row] = number
        return tuple(Assignment(found, len(ranked)) for found in indices)

    def scatter(self) -> float:
        """Return sum |w - mean of its global unit|² over sum |w|², without tie-breakers."""
        apart = total = 0.0
        for unit in self._global:
            rows: list[Any] = [
                self._rows[client][row, : self._lengths] for client, row in unit.members.items()
            ]
            mean = sum(rows) / len(rows)
            apart += sum(float((row - mean) @ (row - mean)) for row in rows)
            total += sum(float(row @ row) for row in rows)
        return apart / total if total else 0.0
