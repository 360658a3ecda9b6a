"""Units, priors and matchings, and the scores of assignments (eq. permutation_extended)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from fedmerge.values.arrays import Array, BoolArray, Float64Array, FloatArray, IntArray
from fedmerge.values.plans import Assignment

# How much is copied, converted or summed at once: bounds memory, keeps copies in the processor's
# cache, and changes results by rounding only.
NUMBERS_PER_CHUNK = 1 << 16
COLUMNS_PER_SUM = 256
SAFE_PRODUCTS = (1e-30, 1e30)  # whose terms neither vanished nor overflowed in float32


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of so many rows that a chunk of a (rows, columns) array stays small."""
    step = max(1, NUMBERS_PER_CHUNK // max(columns, 1))
    for low in range(0, rows, step):
        yield slice(low, low + step)


def as_slice(numbers: IntArray) -> IntArray | slice:
    """Return rising numbers as a slice if they follow each other, which saves copies."""
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def row_products(left: FloatArray, right: FloatArray) -> Float64Array:
    """Return (rows,) products of the rows of two arrays, runs of columns added up in float64.

    Rows whose numbers vanish or overflow in float32 when they are multiplied are multiplied in
    float64.
    """
    rows, columns = left.shape
    runs = columns // COLUMNS_PER_SUM
    even = runs * COLUMNS_PER_SUM
    shape = (rows, runs, COLUMNS_PER_SUM)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.einsum(
            "irk,irk->ir", left[:, :even].reshape(shape), right[:, :even].reshape(shape)
        )
        rest: FloatArray = np.einsum("ik,ik->i", left[:, even:], right[:, even:])
        total: Float64Array = sums.sum(axis=1, dtype=np.float64) + rest
    low, high = SAFE_PRODUCTS
    unsafe = np.flatnonzero(~((abs(total) > low) & (abs(total) < high)))
    if len(unsafe):
        total[unsafe] = np.einsum("ik,ik->i", left[unsafe], right[unsafe], dtype=np.float64)
    return total


def row_squares(array: FloatArray) -> Float64Array:
    """Return (rows,) the squared norms of an array's rows."""
    return row_products(array, array)


# Near twins are looked for along a few fixed directions: of two units a and b |P(a-b)|² is about
# |a-b|², and whatever lies below a thousand times float32's error must be caught.
TWIN_DISTANCE = 1e-2  # |P(a-b)|² relative to (|Pa|²+|Pb|²)/2
TWIN_DIRECTIONS = 16
FLOAT32_SAFE_SQUARES = (1e-20, 1e20)  # |w|² whose products neither vanish nor overflow in float32


def near_twins(weights: FloatArray, squares: Float64Array) -> BoolArray:
    """Return (units,) which units of (units, features) resemble another one, or are next to zero.

    `squares` (units,) are their squared norms. It may be too many, never too few. The directions
    are random signs from a fixed seed: the same units get the same answer.
    """
    low, high = FLOAT32_SAFE_SQUARES
    usable = (squares >= low) & (squares < high)
    found = ~usable
    found[usable] = _has_neighbour(_sketch(weights if usable.all() else weights[usable]))
    return found


def _sketch(units: FloatArray) -> Float64Array:
    """Return (units, directions) sums of each unit's features with random signs.

    Every direction has a run of features of its own, so one pass over them gives all.
    """
    length = units.shape[1]
    run = -(-length // TWIN_DIRECTIONS)
    bits = np.random.default_rng(0).integers(0, 2, length, dtype=np.int8)
    signs = (2 * bits - 1).astype(np.float32)
    sketch = np.zeros((len(units), TWIN_DIRECTIONS))
    for direction in range(TWIN_DIRECTIONS):
        some = slice(direction * run, (direction + 1) * run)
        sketch[:, direction] = units[:, some] @ signs[some]
    return sketch


def _has_neighbour(points: Float64Array) -> BoolArray:
    """Return (points,) which of (points, directions) have another one near them.

    |a-b|² ≤ distance · (|a|²+|b|²)/2 where a·b - c·|a|² - c·|b|² ≥ 0 with c = ½ - distance/4, which
    is one product of the points with |·|² and 1 beside them.
    """
    share = 0.5 - TWIN_DISTANCE / 4
    squares = row_squares(points)[:, None]
    ones = np.ones_like(squares)
    left = np.hstack([points, -share * squares, ones])
    right = np.hstack([points, ones, -share * squares])
    found = np.zeros(len(points), dtype=np.bool_)
    for rows in row_chunks(len(left), len(right)):
        found[rows] = np.count_nonzero(left[rows] @ right.T >= 0, axis=1) > 1
    return found


SolverName: TypeAlias = Literal["auto", "scipy", "lapjv", "lapsolver"]


@dataclass(frozen=True)
class UnitFeatures:
    """One client's units of one group."""

    weights: FloatArray  # (units, features), float32 or float64
    ties: FloatArray  # (units, tie features), scaled tie-breakers; may have no columns

    def __post_init__(self) -> None:
        assert self.weights.ndim == self.ties.ndim == 2
        assert len(self.weights) == len(self.ties), "weights and ties of different units"

    @property
    def count(self) -> int:
        """How many units the client has."""
        return len(self.weights)

    @property
    def length(self) -> int:
        """How many numbers describe one unit, tie-breakers included."""
        return int(self.weights.shape[1] + self.ties.shape[1])

    @cached_property
    def twins(self) -> BoolArray:
        """Which units' weights (units,) resemble another one's: where tie-breakers decide."""
        return near_twins(self.weights, self.squares)

    @cached_property
    def squares(self) -> Float64Array:
        """The squared norms (units,) of the units' weights."""
        return row_squares(self.weights)


@dataclass(frozen=True)
class Prior:
    """Beta-Bernoulli process prior of mean 0; sigma and sigma0 are variances."""

    sigma: float  # of a client's unit about its global unit
    sigma0: float  # of a global unit about 0
    gamma: float = 1.0  # mass of the process: how readily new units appear
    popularity_weight: float = 2.0  # the paper's code uses 1
    popularity_clip: int | None = None  # the paper's code clips counts at 10

    def __post_init__(self) -> None:
        assert self.sigma > 0, "no spread at all: keep the units apart instead"
        assert self.sigma0 > 0
        assert self.gamma > 0
        assert self.popularity_clip is None or self.popularity_clip > 0


def prior_at_threshold(threshold: float, second_moment: float, *, gamma: float) -> Prior:
    """Return the prior under which two units of equal norm pair up above this cosine.

    sigma0 = t·V and sigma = (1 - t)·V with V the features' second moment about 0; features that
    are all 0 have no scale, so V = 1 there.
    """
    assert 0 < threshold < 1
    scale = second_moment if second_moment > 0 else 1.0
    return Prior(sigma=(1 - threshold) * scale, sigma0=threshold * scale, gamma=gamma)


@dataclass(frozen=True)
class SearchOptions:
    """How long and with what the best assignments are looked for."""

    sweeps: int = 20  # at most so many after every client was placed once
    solver: SolverName = "auto"
    min_gain: float = 1e-9  # relative rise of the score that a change must bring
    unit_cap: int | None = None  # the paper's code stops adding units at 700
    keep: int = 1 << 28  # bytes of rewards kept between visits; changes the time only
    device: str = "cpu"  # where matrix products run, as torch names it


@dataclass(frozen=True)
class Shortcuts:
    """Exact savings of the search, switchable to be tested and measured one by one."""

    reuse: bool = True  # keep products between visits, renew those of changed units
    skip: bool = True  # pass over a client for whom nothing changed
    bound: bool = True  # and over one whom bounds prove to be where it is best
    prune: bool = True  # leave out rows and columns that no optimum matches
    reduce: bool = True  # offer only as many new units as can be used
    price: bool = True  # offer new units at one price, not as columns
    greedy: bool = True  # no solver where every row's favourite is its own
    stop: bool = True  # end the search after a sweep that changes nothing
    pair: bool = True  # make no sweep over two equally wide clients: one step solves their problem


class TooWide(Exception):  # noqa: N818, how a search ends that nobody wants the result of
    """The global units of a search became more than any use of them allows."""


@dataclass(frozen=True)
class GroupMatching:
    """Where every client's units of one group went."""

    assignments: tuple[Assignment, ...]  # in the clients' given order
    width: int  # global units
    sweeps: int  # that were run
    scatter: float  # sum of |w - mean of its global unit|² over sum of |w|², without tie-breakers
    similarities: tuple[Float64Array, ...] = ()  # (units,) cosine with the fellow owners' mean
    threshold: float | None = None  # the cosine above which units pair up, if one was set
    leaders: tuple[int, ...] = ()  # the client whose unit each global one stands for, if any
    outer: tuple[Assignment, ...] = ()  # of the units around these, where they have own orders

    @property
    def numbers(self) -> list[IntArray]:
        """Every client's global units (units,), counted over all outer ones."""
        outer = self.outer or (None,) * len(self.assignments)
        return [own.numbers(each) for own, each in zip(self.assignments, outer, strict=True)]

    @property
    def match_rate(self) -> float:
        """Share of the clients' units whose global unit has at least two members."""
        homes = np.concatenate(self.numbers)
        if not len(homes):
            return 0.0
        members = np.bincount(homes)
        return float(np.mean(members[homes] >= 2))


@dataclass(frozen=True)
class ClientUnits:
    """One client's units with what every visit needs to know about them."""

    features: UnitFeatures
    squares: Float64Array  # (units,), |w|² with tie-breakers
    total: float  # sum of |w|² without tie-breakers
    exact: BoolArray  # (units,), whose products need float64


def client_units(features: UnitFeatures, *, exact: bool) -> ClientUnits:
    """Return a client's units, all to be multiplied in float64 if `exact` or float64 already."""
    squares = features.squares + row_squares(features.ties)
    if exact or any(part.dtype == np.float64 for _, part in feature_parts(features)):
        sensitive = np.ones(features.count, dtype=np.bool_)
    else:
        sensitive = features.twins
    return ClientUnits(features, squares, float(features.squares.sum()), sensitive)


def feature_parts(features: UnitFeatures) -> Iterator[tuple[slice, FloatArray]]:
    """Yield (place in the joined features, (units, part) view) of weights, then of ties if any."""
    split = features.weights.shape[1]
    yield slice(0, split), features.weights
    if features.ties.shape[1]:
        yield slice(split, features.length), features.ties


LARGE_PRODUCT = 1 << 26  # multiplications, about a millisecond on one core
FEATURES_PER_PRODUCT = 2048  # converted to float64 at once; changes memory and rounding only


@dataclass(frozen=True)
class Products:
    """What the rewards need of a client's units and the sums over the other clients' members."""

    inner: FloatArray  # (units, sums), w · sum
    squares: Float64Array  # (sums,), |sum|²


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


def multiply(
    left: FloatArray,
    right: FloatArray,
    *,
    exact_left: BoolArray,
    exact_right: BoolArray,
    device: str,
) -> FloatArray:
    """Return left · rightᵀ (m, n), in float64 at least where a row of either is marked exact."""
    if exact_left.all() or exact_right.all():
        return _multiply_wide(left, right, device)
    narrow = left.astype(np.float32, copy=False)
    rough: FloatArray = _matmul(narrow, right.astype(np.float32, copy=False), device)
    if not (exact_left.any() or exact_right.any()):
        return rough
    product = rough.astype(np.float64)
    product[exact_left] = _multiply_wide(left[exact_left], right, device)
    product[:, exact_right] = _multiply_wide(left, right[exact_right], device)
    return product


def _multiply_wide(left: FloatArray, right: FloatArray, device: str) -> Float64Array:
    """Return left · rightᵀ (m, n) in float64, converting some features at a time."""
    product = np.zeros((len(left), len(right)))
    for low in range(0, left.shape[1], FEATURES_PER_PRODUCT):
        now = slice(low, low + FEATURES_PER_PRODUCT)
        wide = left[:, now].astype(np.float64, copy=False)
        product += _matmul(wide, right[:, now].astype(np.float64, copy=False), device)
    return product


def _matmul(left: Array, right: Array, device: str) -> Array:
    """Return left · rightᵀ in the inputs' precision: small ones by numpy, all others by torch.

    Torch's threads are worth waiting for in large products only.
    """
    if device == "cpu" and left.size * len(right) < LARGE_PRODUCT:
        product: Array = left @ right.T
        return product
    import torch

    def moved(array: Array) -> Any:
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        # Apple's GPUs know no float64.
        return tensor.float().to(device) if device.startswith("mps") else tensor.to(device)

    result: Array = (moved(left) @ moved(right).T).cpu().numpy()
    return result


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


def base_scores(squares: Float64Array, prior: Prior) -> Float64Array:
    """Return (units,) what a unit with this |w|² scores by itself: |v|²/(s+s0)."""
    s, s0 = 1 / prior.sigma, 1 / prior.sigma0
    return squares * (s * s / (s + s0))


def new_rewards(count: int, clients: int, gamma: float) -> Float64Array:
    """Return (count,) rewards of the first, second, … new unit: 2·log(gamma/J) - 2·log k."""
    ranks = np.log(np.arange(1, count + 1), dtype=np.float64)
    rewards: Float64Array = 2 * np.log(gamma / clients) - 2 * ranks
    return rewards


def popularity(counts: IntArray, clients: int, prior: Prior) -> Float64Array:
    """Return (sums,) the reward for joining n members: weight · log(n/(J-n)), n perhaps clipped."""
    known = counts if prior.popularity_clip is None else np.minimum(counts, prior.popularity_clip)
    return prior.popularity_weight * np.log(known / (clients - known))


def existing_rewards(
    products: Products, squares: Float64Array, counts: IntArray, clients: int, prior: Prior
) -> Float64Array:
    """Return (units, sums) rewards of joining each sum of `counts` members.

    |v+g|²/(s+S) - |g|²/S - |v|²/(s+s0) + popularity
    = 2·v·g/(s+S) + |v|²·(1/(s+S) - 1/(s+s0)) + |g|²·(1/(s+S) - 1/S) + popularity
    """
    s, s0 = 1 / prior.sigma, 1 / prior.sigma0
    joined = 1 / (s + s0 + s * counts)
    alone = 1 / (s0 + s * counts)
    by_column = s * s * products.squares * (joined - alone) + popularity(counts, clients, prior)
    rewards = np.empty(products.inner.shape)
    for rows in row_chunks(len(squares), len(counts)):
        np.multiply.outer(s * s * squares[rows], joined - 1 / (s + s0), out=rewards[rows])
        rewards[rows] += products.inner[rows] * (2 * s * s * joined)
        rewards[rows] += by_column
    return rewards


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
