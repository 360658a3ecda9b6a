"""Inner products between a client's units and the sums of the others'; precision and device.

float64 features are multiplied in float64, float32 ones in float32, and again in float64 for units
that need it (near twins) and for global units that hold one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmerge.matching.clients import ClientUnits, feature_parts
from fedmerge.matching.rows import as_slice, row_chunks, row_products, row_squares
from fedmerge.types.arrays import Array, BoolArray, Float64Array, FloatArray, IntArray

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
