"""One client's visit: take it out, find its best step, accept it if it is better."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.errors import MatchingError
from fedmerge.matching.products import ClientUnits, products_with_others
from fedmerge.matching.rewards import base_scores, existing_rewards, new_rewards
from fedmerge.matching.slots import HOMELESS, Slots
from fedmerge.matching.steps import NEW, StepProblem, best_step
from fedmerge.matching.values import Prior, SearchOptions, Shortcuts
from fedmerge.types.arrays import Float64Array, IntArray

COLUMNS_AT_ONCE = 512  # whose rewards are computed together; bounds memory, changes the time only


@dataclass(frozen=True)
class View:
    """The global units as one client sees them while it is taken out."""

    columns: IntArray  # (columns,), slots with members of other clients
    current: IntArray  # (units,), column of each of the client's units, NEW where alone
    own: IntArray  # (slots,), the client's unit in each slot, -1 where it has none


@dataclass
class Memory:
    """What a client's last visit found; it holds for every slot whose members did not change."""

    rewards: Float64Array  # (units, slots), or no slots where nothing was kept
    visited: int = -1  # when


class Visitor:
    """The state of a search: the slots, and what each client remembers of them."""

    def __init__(
        self,
        clients: Sequence[ClientUnits],
        slots: Slots,
        prior: Prior,
        options: SearchOptions,
        *,
        max_width: int | None,
        shortcuts: Shortcuts,
    ) -> None:
        self._clients, self._slots, self._prior, self._options = clients, slots, prior, options
        self._max_width, self._shortcuts = max_width, shortcuts
        self._now = 0
        self._memories = [Memory(np.zeros((client.features.count, 0))) for client in clients]

    def visit(self, client: int) -> bool:
        """Give a client its best step given the others, and return whether anything changed."""
        self._now += 1
        memory = self._memories[client]
        is_placed = memory.visited >= 0
        if is_placed and self._shortcuts.skip and not self._slots.changed_since(memory.visited):
            return False
        view = self._view(client)
        rewards = self._rewards(client, view)
        memory.visited = self._now
        ranks = new_rewards(len(rewards), len(self._clients), self._prior.gamma)
        allowed = ranks[: self._room(len(rewards), len(view.columns))]
        problem = StepProblem(rewards, allowed)
        targets = best_step(problem, self._options.solver, self._shortcuts)
        changed = np.flatnonzero(targets != view.current) if is_placed else np.arange(len(targets))
        if is_placed and not self._is_better(client, rewards, view.current, targets):
            return False
        self._slots.move(client, changed, _slots_of(targets[changed], view), now=self._now)
        return True

    def _view(self, client: int) -> View:
        """Return the slots without this client."""
        own = self._slots.members_of(client)
        columns = np.flatnonzero(self._slots.counts > (own >= 0))
        places = np.full(self._slots.capacity + 1, NEW, dtype=np.int64)  # the last: HOMELESS
        places[columns] = np.arange(len(columns))
        return View(columns, places[self._slots.homes[client]], own)

    def _rewards(self, client: int, view: View) -> Float64Array:
        """Return (units, columns) rewards, computing only what changed since they were kept."""
        memory, columns, capacity = self._memories[client], view.columns, self._slots.capacity
        units, held = memory.rewards.shape
        keeps = self._shortcuts.reuse and self._fits(units * capacity)
        is_ready = keeps and held == capacity
        rewards = memory.rewards if is_ready else np.empty((units, capacity))
        if keeps and held < capacity:
            rewards[:, :held] = memory.rewards
        memory.rewards = rewards if keeps else np.empty((units, 0))
        stale = columns
        if keeps and held:
            stale = columns[self._slots.changed[columns] > memory.visited]
        for low in range(0, len(stale), COLUMNS_AT_ONCE):
            some = stale[low : low + COLUMNS_AT_ONCE]
            rewards[:, _as_slice(some)] = self._fresh_rewards(client, some, view.own[some])
        return rewards[:, _as_slice(columns)]

    def _fits(self, numbers: int) -> bool:
        """Return whether every client may keep so many rewards."""
        return numbers * np.dtype(np.float64).itemsize * len(self._clients) <= self._options.keep

    def _fresh_rewards(self, client: int, columns: IntArray, own: IntArray) -> Float64Array:
        """Return (units, columns) rewards of joining these slots, the client's `own` taken out."""
        units, slots = self._clients[client], self._slots
        products = products_with_others(
            units,
            slots.sums,
            own,
            columns=columns,
            exact=slots.exact[columns] > 0,
            device=self._options.device,
        )
        counts = slots.counts[columns] - (own >= 0)
        return existing_rewards(products, units.squares, counts, len(self._clients), self._prior)

    def _room(self, units: int, live: int) -> int:
        """Return how many new global units a client of so many units may bring."""
        if live == 0:  # the first client brings all of its units
            return units
        room = units
        if self._max_width is not None:
            room = min(room, self._max_width - live)
        cap = self._options.unit_cap
        if cap is not None:
            room = min(room, max(cap - live, 1))
            if units > live + room:
                raise MatchingError(
                    f"a client of {units} units meets {live} global units, and the cap of {cap} "
                    f"leaves room for {room} more",
                    f"raise the cap to {units} or more, or drop the preset that sets it",
                )
        return room

    def _is_better(
        self, client: int, rewards: Float64Array, current: IntArray, targets: IntArray
    ) -> bool:
        """Return whether targets beat the current ones by min_gain of what the changed units score.

        Only changed units are compared, so that one swap among many units is judged by its own.
        """
        changed = np.flatnonzero(targets != current)
        before = _rewards_at(rewards, changed, current[changed])
        after = _rewards_at(rewards, changed, targets[changed])
        ranks = new_rewards(len(rewards), len(self._clients), self._prior.gamma)
        alone, added = np.count_nonzero(current == NEW), np.count_nonzero(targets == NEW)
        gain = (after - before).sum() + ranks[alone:added].sum() - ranks[added:alone].sum()
        base = base_scores(self._clients[client].squares[changed], self._prior)
        scale = (base + abs(before) + abs(after)).sum()
        return bool(gain > self._options.min_gain * scale)


def _as_slice(columns: IntArray) -> IntArray | slice:
    """Return rising columns as a slice if they follow each other, which saves copies."""
    if len(columns) and columns[-1] - columns[0] == len(columns) - 1:
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return columns


def _rewards_at(rewards: Float64Array, units: IntArray, targets: IntArray) -> Float64Array:
    """Return (units,) the rewards of targets, 0 for new ones."""
    found = np.zeros(len(units))
    joined = targets != NEW
    found[joined] = rewards[units[joined], targets[joined]]
    return found


def _slots_of(targets: IntArray, view: View) -> IntArray:
    """Return (units,) the slots of targets, HOMELESS where a new one is to be found."""
    slots = np.full(len(targets), HOMELESS, dtype=np.int64)
    joined = targets != NEW
    slots[joined] = view.columns[targets[joined]]
    return slots
