"""Label trees: what is known of one axis while a model runs.

A label is free to be permuted (`Label`), constant along the axis (`Same`), pinned (`Fixed`), a
row-major product or a concatenation. Products and concatenations are always in normal form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import TypeAlias


@dataclass(frozen=True)
class Label:
    """Positions that may be permuted by any rule of their own."""

    number: int
    size: int


@dataclass(frozen=True)
class Same:
    """Positions that all hold the same values, so that no permutation changes them."""

    number: int
    size: int


@dataclass(frozen=True)
class Fixed:
    """Positions that may not be permuted, and why."""

    size: int
    reason: str = ""


@dataclass(frozen=True)
class Factors:
    """Row-major product of trees, the first one slowest."""

    trees: tuple[Tree, ...]
    size: int


@dataclass(frozen=True)
class Parts:
    """Trees one after another."""

    trees: tuple[Tree, ...]
    size: int


Tree: TypeAlias = Label | Same | Fixed | Factors | Parts
Axes: TypeAlias = tuple[Tree, ...]


def product(trees: Iterable[Tree]) -> Tree:
    """Return the normal form of a product: flat, no factor of size 1, fixed neighbours as one."""
    flat: list[Tree] = []
    for tree in trees:
        flat += tree.trees if isinstance(tree, Factors) else (tree,)
    merged = _merge_fixed((t for t in flat if t.size != 1), lambda a, b: a * b)
    if not merged:
        return Fixed(1)
    size = reduce(lambda total, tree: total * tree.size, merged, 1)
    return merged[0] if len(merged) == 1 else Factors(tuple(merged), size)


def concat(trees: Iterable[Tree]) -> Tree:
    """Return the normal form of a concatenation: flat, n equal parts as `n × part`."""
    flat: list[Tree] = []
    for tree in trees:
        flat += tree.trees if isinstance(tree, Parts) else (tree,)
    merged = _merge_fixed((t for t in flat if t.size), lambda a, b: a + b)
    if not merged:
        return Fixed(0)
    if len(merged) == 1:
        return merged[0]
    if all(tree == merged[0] for tree in merged) and not isinstance(merged[0], Same):
        return product((Fixed(len(merged)), merged[0]))
    return Parts(tuple(merged), sum(tree.size for tree in merged))


def leaves(tree: Tree) -> Iterator[Label | Same | Fixed]:
    """Yield the leaves of a tree from left to right."""
    if isinstance(tree, Factors | Parts):
        for child in tree.trees:
            yield from leaves(child)
    else:
        yield tree


def has_same(tree: Tree) -> bool:
    """Return whether part of a tree is constant."""
    return any(isinstance(leaf, Same) for leaf in leaves(tree))


def labels_of(tree: Tree) -> list[Label]:
    """Return the labels of a resolved tree from left to right, with repeats."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Label)]


def _merge_fixed(trees: Iterable[Tree], join: Callable[[int, int], int]) -> list[Tree]:
    merged: list[Tree] = []
    for is_fixed, run in groupby(trees, lambda tree: isinstance(tree, Fixed)):
        found = list(run)
        if is_fixed and len(found) > 1:
            reason = next((t.reason for t in found if isinstance(t, Fixed) and t.reason), "")
            found = [Fixed(reduce(join, (tree.size for tree in found)), reason)]
        merged += found
    return merged
