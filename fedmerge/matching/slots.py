"""Global units during a search: their members, sums, and products with a client's units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmerge.matching.scores import (
    ClientUnits,
    Products,
    as_slice,
    feature_parts,
    multiply,
    row_chunks,
    row_products,
    row_squares,
)
from fedmerge.values.arrays import BoolArray, Float64Array, FloatArray, IntArray

HOMELESS = -1  # the slot of a unit that is not placed yet

GROWTH = 1.5  # of the slot array when it is full; changes the time and memory only


class Slots:
    """Sums and counts of the members of every global unit, changed in place.

    A slot keeps its number as long as it has members; an empty one is given out again.
    """

    sums: FloatArray  # (slots, features), sum of the members; float64 if any product needs it
    squares: Float64Array  # (slots,), |sum|²
    counts: IntArray  # (slots,), members; 0 where free
    exact: IntArray  # (slots,), members whose products need float64
    changed: IntArray  # (slots,), when a member last came or left
    travel: Float64Array  # (slots,), |w| added up over all members that came or left

    def __init__(self, clients: Sequence[ClientUnits], capacity: int) -> None:
        self._clients = clients
        self.homes: list[IntArray] = [
            np.full(client.features.count, HOMELESS, dtype=np.int64) for client in clients
        ]
        dtype = np.float64 if any(client.exact.any() for client in clients) else np.float32
        self.sums = np.zeros((capacity, clients[0].features.length), dtype=dtype)
        self.squares = np.zeros(capacity)
        self.counts = np.zeros(capacity, dtype=np.int64)
        self.exact = np.zeros(capacity, dtype=np.int64)
        self.changed = np.full(capacity, -1, dtype=np.int64)
        self.travel = np.zeros(capacity)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """How many slots there are, free ones included."""
        return len(self.counts)

    @property
    def width(self) -> int:
        """How many slots have members."""
        return int(np.count_nonzero(self.counts))

    def changed_since(self, time: int) -> bool:
        """Return whether a member of any slot came or left after this time."""
        return bool((self.changed > time).any())

    def members_of(self, client: int) -> IntArray:
        """Return (slots,) the client's unit in each slot, -1 where it has none."""
        members = np.full(self.capacity, -1, dtype=np.int64)
        homes = self.homes[client]
        placed = np.flatnonzero(homes != HOMELESS)
        members[homes[placed]] = placed
        return members

    def move(self, client: int, units: IntArray, slots: IntArray, *, now: int) -> None:
        """Move some units of a client to other slots; HOMELESS stands for one of their own."""
        old = self.homes[client][units]
        placed = old != HOMELESS
        self._change(client, units[placed], old[placed], sign=-1, now=now)
        emptied = old[placed][self.counts[old[placed]] == 0]
        self.sums[emptied] = 0  # no rounding may survive its members
        self.squares[emptied] = 0
        self._free.extend(sorted(emptied.tolist(), reverse=True))
        slots = slots.copy()
        alone = np.flatnonzero(slots == HOMELESS)
        slots[alone] = self._take(len(alone))
        self._change(client, units, slots, sign=1, now=now)
        self.homes[client][units] = slots

    def _change(
        self, client: int, units: IntArray, slots: IntArray, *, sign: int, now: int
    ) -> None:
        """Add (sign 1) or take away (sign -1) units of one client, each from its own slot."""
        change = np.add if sign > 0 else np.subtract
        self.squares[slots] = 0
        for place, part in feature_parts(self._clients[client].features):
            for rows in row_chunks(len(units), part.shape[1]):
                members = self.sums[slots[rows], place]
                self.sums[slots[rows], place] = change(members, part[units[rows]], out=members)
                self.squares[slots[rows]] += row_squares(members)
        self.counts[slots] += sign
        self.exact[slots] += sign * self._clients[client].exact[units]
        self.travel[slots] += np.sqrt(self._clients[client].squares[units])
        self.changed[slots] = now

    def _take(self, count: int) -> IntArray:
        """Return (count,) free slots, lowest first where none was freed, growing if needed."""
        missing = count - len(self._free)
        if missing > 0:
            self._grow(max(self.capacity + missing, int(self.capacity * GROWTH)))
        return np.array([self._free.pop() for _ in range(count)], dtype=np.int64)

    def _grow(self, capacity: int) -> None:
        """Append free slots."""
        added = capacity - self.capacity
        self._free[:0] = range(capacity - 1, self.capacity - 1, -1)
        self.sums = np.concatenate(
            [self.sums, np.zeros((added, self.sums.shape[1]), self.sums.dtype)]
        )
        self.squares = np.concatenate([self.squares, np.zeros(added)])
        self.counts = np.concatenate([self.counts, np.zeros(added, dtype=np.int64)])
        self.exact = np.concatenate([self.exact, np.zeros(added, dtype=np.int64)])
        self.changed = np.concatenate([self.changed, np.full(added, -1, dtype=np.int64)])
        self.travel = np.concatenate([self.travel, np.zeros(added)])


def products_with_others(
    units: ClientUnits,
    sums: FloatArray,
    own: IntArray,
    *,
    columns: IntArray,
    exact: BoolArray,
    device: str,
) -> Products:
    """Multiply (units, features) by the `columns` rows of (slots, features) sums without `own`.

    It may copy those rows, so callers ask for some columns at a time.
    `own` (columns,) is the client's own member of each sum, -1 where it has none; `exact`
    (columns,) marks the sums that need float64.
    """
    dtype = np.float64 if units.exact.any() or exact.any() else np.float32
    products: list[FloatArray] = []
    squares = np.zeros(len(columns))
    for place, part in feature_parts(units.features):
        others, own_squares = _others(part, sums[:, place], columns, own, dtype)
        squares += own_squares
        products.append(
            multiply(part, others, exact_left=units.exact, exact_right=exact, device=device)
        )
    return Products(sum(products[1:], products[0]), squares)


def _others(
    part: FloatArray, sums: FloatArray, columns: IntArray, own: IntArray, dtype: type[np.floating]
) -> tuple[FloatArray, Float64Array]:
    """Return (columns, features) sums without the client's own members, and (columns,) their |·|².

    Sums that it has no part in are not copied if they follow each other.
    """
    if (own < 0).all() and isinstance(at := as_slice(columns), slice) and sums.dtype == dtype:
        return sums[at], row_squares(sums[at])
    others = np.empty((len(columns), part.shape[1]), dtype=dtype)
    squares = np.empty(len(columns))
    for rows in row_chunks(len(columns), part.shape[1]):
        chunk = sums[columns[rows]]
        shared = own[rows] >= 0
        if shared.all():
            chunk -= part[own[rows]]
        else:
            chunk[shared] -= part[own[rows][shared]]
        squares[rows] = row_squares(chunk)
        others[rows] = chunk
    return others, squares


def products_at_home(units: ClientUnits, sums: FloatArray, homes: IntArray) -> Float64Array:
    """Return (units,) the product of each unit with the sum of its home, itself included."""
    products = np.zeros(units.features.count)
    for place, part in feature_parts(units.features):
        for rows in row_chunks(*part.shape):
            products[rows] += row_products(part[rows], sums[homes[rows], place])
    return products
