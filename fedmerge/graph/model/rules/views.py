"""Regroup axes as `view` does: by prefix products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedmerge.graph.model.labels import Labels
from fedmerge.graph.model.trees import Fixed, Tree, product


def regroup(labels: Labels, axes: Sequence[Tree], shape: Sequence[int]) -> list[Tree]:
    """Return the labels of a row-major view; a chunk that doesn't align is pinned."""
    if not all(axis.size for axis in axes):
        for axis in axes:
            labels.pin(axis)
        return [Fixed(size) for size in shape]
    result: list[Tree] = [Fixed(1)] * len(shape)
    for before, after in chunks([axis.size for axis in axes], shape):
        tree = product(labels.resolve(axes[k]) for k in before)
        factors = labels.split(tree, [shape[k] for k in after]) if after else []
        for k, factor in zip(after, factors, strict=True):
            result[k] = factor
    return result


def chunks(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest runs of old and new axes with equal products (those of size 1 apart)."""
    before = [k for k, size in enumerate(old) if size != 1]
    after = [k for k, size in enumerate(new) if size != 1]
    while before:
        left, right = [before.pop(0)], [after.pop(0)]
        have, want = old[left[0]], new[right[0]]
        while have != want:
            if have < want:
                left.append(before.pop(0))
                have *= old[left[-1]]
            else:
                right.append(after.pop(0))
                want *= new[right[-1]]
        yield left, right
