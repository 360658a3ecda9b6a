"""Move arrays to mapped positions, in blocks and runs, so that no further large one is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedmerge.types.arrays import Array, Float64Array, IntArray

BLOCK = 1 << 17  # numbers handled at once, few enough to stay in a processor's cache


def add_mapped(
    total: Float64Array, maps: Sequence[IntArray], values: Array, weights: Float64Array
) -> None:
    """Add weights × values at the positions that the axes' injective maps give, in place.

    `weights` is one number, or has the dimensions of `values` and size 1 along all axes but one.
    """
    if not maps:
        total += weights * values
        return
    axes = [_runs(m, size) for m, size in zip(maps[1:], total.shape[1:], strict=True)]
    sources = _inverse(maps[0], len(total))
    step = max(1, BLOCK // max(1, math.prod(total.shape[1:])))
    for start in range(0, len(total), step):
        rows = sources[start : start + step]
        owned = rows >= 0
        part = _weighted(values, rows[owned], weights)
        for axis, runs in enumerate(axes, start=1):
            part = _taken(part, axis, runs, total.shape[axis])
        target = total[start : start + step]
        if owned.all():
            target += part
        else:
            target[owned] += part


def take_mapped(values: Array, axis: int, positions: IntArray, size: int) -> Array:
    """Return an array with one axis moved to new positions among `size`, zero at the others."""
    return _taken(values, axis, _runs(positions, size), size)


def is_identity(positions: IntArray, size: int) -> bool:
    """Return whether a map leaves every one of `size` positions where it is."""
    return len(positions) == size and bool(np.all(positions == np.arange(size)))


def _runs(positions: IntArray, size: int) -> IntArray | None:
    """Return the source of every run of new positions, -1 for none; None for an identity.

    Runs are as long as every old run of consecutive positions allows: units of a flattened
    convolution move as whole images.
    """
    if is_identity(positions, size):
        return None
    breaks = 1 + np.flatnonzero(np.diff(positions) != 1)
    starts = np.concatenate([breaks, positions[breaks], positions[:1]])
    length = int(np.gcd.reduce(starts, initial=np.gcd(len(positions), size)))
    return _inverse(positions[::length] // length, size // length)


def _inverse(positions: IntArray, size: int) -> IntArray:
    """Return the old position of every one of `size` new ones, -1 for those of nobody."""
    sources = np.full(size, -1, dtype=np.int64)
    sources[positions] = np.arange(len(positions))
    return sources


def _weighted(values: Array, rows: IntArray, weights: Float64Array) -> Array:
    """Return some rows, times their weights in float64 unless these are 1."""
    part: Array = values[rows]
    if not weights.ndim and weights == 1:
        return part
    own = weights[rows] if weights.ndim and len(weights) > 1 else weights
    return np.multiply(part, own, dtype=np.float64)


def _taken(part: Array, axis: int, runs: IntArray | None, size: int) -> Array:
    """Return an array with one axis of `size` put together from runs of the old one."""
    if runs is None:
        return part
    before, after = part.shape[:axis], part.shape[axis + 1 :]
    length = size // len(runs)
    split = part.reshape(*before, part.shape[axis] // length, length, *after)
    taken: Array = np.take(split, np.maximum(runs, 0), axis=axis)
    if runs.min() < 0:
        np.moveaxis(taken, axis, 0)[runs < 0] = 0
    return taken.reshape(*before, size, *after)


def along(vector: Array, axis: int, dimensions: int) -> Array:
    """Return a vector shaped to broadcast along one axis; a single number stays as it is."""
    return (
        vector.reshape([-1 if k == axis else 1 for k in range(dimensions)])
        if vector.ndim
        else vector
    )
