"""Assign client after client, then sweep until no assignment changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fedmerge.errors import MatchingError
from fedmerge.matching.assignment import NEW, StepProblem, best_step, distinct_favourites
from fedmerge.matching.scores import (
    ClientUnits,
    GroupMatching,
    Prior,
    Products,
    SearchOptions,
    Shortcuts,
    TooWide,
    as_slice,
    base_scores,
    existing_rewards,
    new_rewards,
    row_chunks,
    row_products,
    row_squares,
)
from fedmerge.matching.slots import HOMELESS, Slots, products_at_home, products_with_others
from fedmerge.values.arrays import Float64Array, FloatArray, IntArray
from fedmerge.values.plans import Assignment

# How much of the sums is copied for one product: bounds memory, changes the time only.
NUMBERS_AT_ONCE = 1 << 22
LEAST_COLUMNS = 64

_Floats = TypeVar("_Floats", FloatArray, Float64Array)


@dataclass(frozen=True)
class View:
    """The global units as one client sees them while it is taken out."""

    columns: IntArray  # (columns,), slots with members of other clients
    current: IntArray  # (units,), column of each of the client's units, NEW where alone
    own: IntArray  # (columns,), the client's unit in each of them, -1 where it has none


@dataclass
class Memory:
    """What a client's last step found; it holds for every slot whose members did not change."""

    inner: FloatArray  # (units, slots) products with the sums, or no slots where nothing was kept
    squares: Float64Array  # (slots,), |sum|²
    travel: Float64Array  # (slots,), of the slots' members so far
    stepped: int = -1  # when these were true
    settled: int = -1  # when the client was last found, or put, where it is best
    is_bounded: bool = True  # whether bounds may prove that it is; not tried again once they failed

    @property
    def is_kept(self) -> bool:
        """Whether there are any products."""
        return bool(self.inner.shape[1])


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
        self._memories = [self._empty_memory(client) for client in clients]

    def visit(self, client: int) -> bool:
        """Give a client its best step given the others, and return whether anything changed."""
        self._now += 1
        memory = self._memories[client]
        is_placed = memory.settled >= 0
        if is_placed and self._shortcuts.skip and not self._slots.changed_since(memory.settled):
            return False
        view = self._view(client)
        is_settled = is_placed and self._shortcuts.bound and self._is_settled(client, view)
        memory.settled = self._now
        if is_settled:
            return False
        rewards = self._rewards(client, view)
        targets = best_step(self._problem(rewards), self._options.solver, self._shortcuts)
        changed = np.flatnonzero(targets != view.current) if is_placed else np.arange(len(targets))
        if is_placed and not self._is_better(client, rewards, view.current, targets):
            changed = changed[:0]
        self._slots.move(client, changed, _slots_of(targets[changed], view), now=self._now)
        memory.stepped, memory.travel = self._now, self._slots.travel.copy()
        return len(changed) > 0

    def _view(self, client: int) -> View:
        """Return the slots without this client."""
        own = self._slots.members_of(client)
        columns = np.flatnonzero(self._slots.counts > (own >= 0))
        places = np.full(self._slots.capacity + 1, NEW, dtype=np.int64)  # the last: HOMELESS
        places[columns] = np.arange(len(columns))
        return View(columns, places[self._slots.homes[client]], own[columns])

    def _problem(self, rewards: Float64Array) -> StepProblem:
        """Return the step of a client with these (units, columns) rewards, new units included."""
        units, columns = rewards.shape
        ranks = new_rewards(units, len(self._clients), self._prior.gamma)
        return StepProblem(rewards, ranks[: self._room(units, columns)])

    def _rewards(self, client: int, view: View) -> Float64Array:
        """Return (units, columns) rewards, multiplying only what changed since the last step."""
        memory = self._memories[client]
        since = memory.stepped if memory.is_kept else -1
        self._recall(memory)
        is_stale = self._slots.changed > since
        columns, own = view.columns[is_stale[view.columns]], view.own[is_stale[view.columns]]
        is_stale[columns] = False
        memory.inner[:, is_stale] = 0  # the others have left these
        step = max(LEAST_COLUMNS, NUMBERS_AT_ONCE // max(1, self._clients[client].features.length))
        for low in range(0, len(columns), step):
            some = slice(low, low + step)
            products = self._products(client, columns[some], own[some])
            memory.inner[:, as_slice(columns[some])] = products.inner
            memory.squares[columns[some]] = products.squares
        at = as_slice(view.columns)
        rewards = self._joined(client, view, Products(memory.inner[:, at], memory.squares[at]))
        if not self._may_keep(memory):
            memory.inner = memory.inner[:, :0].copy()
        return rewards

    def _is_settled(self, client: int, view: View) -> bool:
        """Return whether every unit is where it is best even by an upper bound of all rewards.

        Sums that moved by d since the last step changed their products with w by |w|·|d| at most,
        and d is no longer than what their members travelled. The products with a client's own
        homes are computed anew.
        """
        memory, slots, units = self._memories[client], self._slots, self._clients[client]
        if not memory.is_kept or not memory.is_bounded or (view.current == NEW).any():
            return False
        self._recall(memory)
        moved = slots.travel[view.columns] - memory.travel[view.columns]
        bound = memory.inner[:, as_slice(view.columns)] + np.outer(np.sqrt(units.squares), moved)
        home = products_at_home(units, slots.sums, slots.homes[client])
        bound[np.arange(len(home)), view.current] = home - units.squares
        squares = slots.squares[view.columns]
        squares[view.current] += units.squares - 2 * home
        rewards = self._joined(client, view, Products(bound, squares))
        favourites = distinct_favourites(self._problem(rewards))
        memory.is_bounded = favourites is not None and bool((favourites == view.current).all())
        return memory.is_bounded

    def _products(self, client: int, columns: IntArray, own: IntArray) -> Products:
        """Return the products with the sums of these slots, the client's `own` taken out."""
        return products_with_others(
            self._clients[client],
            self._slots.sums,
            own,
            columns=columns,
            exact=self._slots.exact[columns] > 0,
            device=self._options.device,
        )

    def _joined(self, client: int, view: View, products: Products) -> Float64Array:
        """Return (units, columns) rewards of joining the slots."""
        squares = self._clients[client].squares
        counts = self._slots.counts[view.columns] - (view.own >= 0)
        return existing_rewards(products, squares, counts, len(self._clients), self._prior)

    def _empty_memory(self, client: ClientUnits) -> Memory:
        inner = np.empty((client.features.count, 0), dtype=self._slots.sums.dtype)
        return Memory(inner, np.empty(0), np.empty(0))

    def _recall(self, memory: Memory) -> None:
        """Make room in the memory for slots that were added; their sums were zero before."""
        capacity = self._slots.capacity
        memory.inner = _widened(memory.inner, capacity)
        memory.squares = _widened(memory.squares, capacity)
        memory.travel = _widened(memory.travel, capacity)

    def _may_keep(self, memory: Memory) -> bool:
        """Return whether every client may keep so many products."""
        size = memory.inner.nbytes * len(self._clients)
        return self._shortcuts.reuse and size <= self._options.keep

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


def _widened(array: _Floats, size: int) -> _Floats:
    """Return an array with zeros appended along its last axis up to a size."""
    missing = size - array.shape[-1]
    if not missing:
        return array
    zeros = np.zeros((*array.shape[:-1], missing), dtype=array.dtype)
    wide: _Floats = np.concatenate([array, zeros], axis=-1)
    return wide


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


def sweep_units(
    clients: Sequence[ClientUnits],
    prior: Prior,
    options: SearchOptions,
    *,
    max_width: int | None,
    rng: np.random.Generator,
    shortcuts: Shortcuts,
    progress: Callable[[float], None],
    is_hopeless: Callable[[int], bool],
) -> GroupMatching:
    """Match one group's units: the widest client first, the others in their order, then sweeps."""
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
    squares = row_squares(
        slots.sums[:, : clients[0].features.weights.shape[1]]
    )  # without tie-breakers
    return GroupMatching(
        assignments,
        assignments[0].width,
        sweeps,
        _scatter(clients, slots, squares),
        _similarities(clients, slots, squares),
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
