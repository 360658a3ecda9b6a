"""Inner products between a client's units and the sums of the others'; precision and device.

float64 features are multiplied in float64. A float32 product is wrong by some 1e-7 of the two
norms, which no assignment notices except between near twins: units of one client so alike that
tie-breakers (1e-3 of a norm, 1e-6 squared) have to tell them apart. Hence float32 features are
multiplied in float32, and again in float64 for near twins and for global units that hold one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmerge.matching.values import UnitFeatures
from fedmerge.types.arrays import Array, BoolArray, Float64Array, FloatArray, IntArray

# How much is copied or converted at once: bounds memory, keeps copies in the processor's cache,
# and changes results by rounding only.
NUMBERS_PER_CHUNK = 1 << 16
FEATURES_PER_PRODUCT = 2048

# Near twins are looked for along a few fixed directions: of two units a and b |P(a-b)|² is about
# |a-b|², and whatever lies below a thousand times float32's error must be caught.
TWIN_DISTANCE = 1e-2  # |P(a-b)|² relative to (|Pa|²+|Pb|²)/2
TWIN_DIRECTIONS = 16
FLOAT32_SAFE_SQUARES = (1e-20, 1e20)  # |w|² whose products neither vanish nor overflow in float32


@dataclass(frozen=True)
class ClientUnits:
    """One client's units with what every visit needs to know about them."""

    features: UnitFeatures
    squares: Float64Array  # (units,), |w|² with tie-breakers
    total: float  # sum of |w|² without tie-breakers
    exact: BoolArray  # (units,), whose products need float64


def client_units(features: UnitFeatures, *, exact: bool) -> ClientUnits:
    """Return a client's units, all to be multiplied in float64 if `exact` or float64 already."""
    own, ties = _row_squares(features.weights), _row_squares(features.ties)
    squares = own + ties
    if exact or np.float64 in (features.weights.dtype, features.ties.dtype):
        sensitive = np.ones(features.count, dtype=np.bool_)
    else:
        low, high = FLOAT32_SAFE_SQUARES
        sensitive = (squares < low) | (squares > high)
        sensitive |= near_twins(features, usable=~sensitive)
    return ClientUnits(features, squares, float(own.sum()), sensitive)


def feature_parts(features: UnitFeatures) -> Iterator[tuple[slice, FloatArray]]:
    """Yield (place in the joined features, (units, part) view) of weights, then of ties if any."""
    split = features.weights.shape[1]
    yield slice(0, split), features.weights
    if features.ties.shape[1]:
        yield slice(split, features.length), features.ties


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of so many rows that a chunk of a (rows, columns) array stays small."""
    step = max(1, NUMBERS_PER_CHUNK // max(columns, 1))
    for low in range(0, rows, step):
        yield slice(low, low + step)


def near_twins(features: UnitFeatures, *, usable: BoolArray) -> BoolArray:
    """Return (units,) which of the usable units resemble another one; too many rather than few.

    The directions are random signs from a fixed seed: the same units get the same answer.
    """
    signs = np.random.default_rng(0)
    sketch = np.zeros((features.count, TWIN_DIRECTIONS))
    for _, part in feature_parts(features):
        bits = signs.integers(0, 2, (part.shape[1], TWIN_DIRECTIONS), dtype=np.int8)
        known = part if usable.all() else part[usable]
        sketch[usable] += known @ (2 * bits - 1).astype(np.float32)
    squares = _row_squares(sketch)
    found = np.zeros(features.count, dtype=np.bool_)
    for rows in row_chunks(features.count, features.count):
        norms = (squares[rows, None] + squares) / 2
        close = 2 * (norms - sketch[rows] @ sketch.T) <= TWIN_DISTANCE * norms
        found[rows] = np.count_nonzero(close[:, usable], axis=1) > 1
    return found & usable


@dataclass(frozen=True)
class Products:
    """What the rewards need of a client's units and the sums over the other clients' members."""

    inner: FloatArray  # (units, sums), w · sum
    squares: Float64Array  # (sums,), |sum|²


def products_with_others(
    units: ClientUnits,
    sums: Float64Array,
    own: IntArray,
    *,
    columns: IntArray,
    exact: BoolArray,
    device: str,
) -> Products:
    """Multiply (units, features) by the `columns` rows of (slots, features) sums without `own`.

    It makes a copy of those rows, so callers ask for some columns at a time.
    `own` (columns,) is the client's own member of each sum, -1 where it has none; `exact`
    (columns,) marks the sums that need float64.
    """
    dtype = np.float64 if units.exact.any() or exact.any() else np.float32
    products: list[FloatArray] = []
    squares = np.zeros(len(columns))
    for place, part in feature_parts(units.features):
        others = np.empty((len(columns), part.shape[1]), dtype=dtype)
        squares += _take_others(part, sums[:, place], columns, own, out=others)
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
    """Return left · rightᵀ in the inputs' precision, by numpy on the CPU and by torch elsewhere."""
    if device == "cpu":
        product: Array = left @ right.T
        return product
    import torch

    def moved(array: Array) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        # Apple's GPUs know no float64.
        return tensor.float().to(device) if device.startswith("mps") else tensor.to(device)

    result: Array = (moved(left) @ moved(right).T).cpu().numpy()
    return result


def _take_others(
    part: FloatArray, sums: Float64Array, columns: IntArray, own: IntArray, *, out: FloatArray
) -> Float64Array:
    """Write sums[columns] without the client's own members to `out`, and return (columns,) |·|²."""
    squares = np.empty(len(columns))
    for rows in row_chunks(len(columns), part.shape[1]):
        others = sums[columns[rows]]
        shared = own[rows] >= 0
        others[shared] -= part[own[rows][shared]]
        squares[rows] = _row_squares(others)
        out[rows] = others
    return squares


def _row_squares(array: FloatArray) -> Float64Array:
    """Return (rows,) the squared norms of (rows, columns), summed in float64."""
    squares: Float64Array = np.einsum("ij,ij->i", array, array, dtype=np.float64)
    return squares
