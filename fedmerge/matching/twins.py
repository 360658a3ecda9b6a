"""Units of one client so alike that only tie-breakers can tell them apart.

A float32 product is wrong by some 1e-7 of the two norms, which no assignment notices except between
near twins: tie-breakers are 1e-3 of a norm, 1e-6 squared.
"""

import numpy as np

from fedmerge.matching.rows import row_chunks, row_squares
from fedmerge.types.arrays import BoolArray, Float64Array, FloatArray

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
