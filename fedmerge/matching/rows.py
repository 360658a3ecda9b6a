"""Arrays of rows too large for the processor's cache: in chunks, and in sums that stay exact."""

from collections.abc import Iterator

import numpy as np

from fedmerge.types.arrays import Float64Array, FloatArray, IntArray

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
