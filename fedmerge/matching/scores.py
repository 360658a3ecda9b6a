"""Units, priors and matchings, and the scores of assignments (eq. permutation_extended)."""

from collections.abc import Iterator
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
