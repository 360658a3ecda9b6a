"""Labels of tensor axes, unified as operations require it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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


class Labels:
    """All labels of one run, what they turned out to be, and which of them can't grow.

    Every method only restricts the permutations that are left, so the order of the calls and
    needless calls can make the result coarser, never wrong.
    """

    def __init__(self) -> None:
        self._bound: dict[int, Tree] = {}
        self._count = 0
        self.cause = ""  # the op whose rule is at work, the reason of what it pins
        self.marks: list[tuple[Tree, str]] = []  # trees that can't grow, and why

    def fresh(self, size: int) -> Tree:
        """Return a new label; an axis of size 1 (or 0) is never a group."""
        self._count += 1
        return Label(self._count, size) if size > 1 else Fixed(size)

    def same(self, size: int) -> Tree:
        """Return a new axis along which nothing changes."""
        self._count += 1
        return Same(self._count, size) if size > 1 else Fixed(size)

    def resolve(self, tree: Tree) -> Tree:
        """Return the tree with everything known put in, in normal form."""
        match tree:
            case Label(number) | Same(number):
                if number not in self._bound:
                    return tree
                found = self.resolve(self._bound[number])
                self._bound[number] = found
                return found
            case Factors(trees):
                return product(self.resolve(child) for child in trees)
            case Parts(trees):
                return concat(self.resolve(child) for child in trees)
        return tree

    def mark(self, tree: Tree, why: str) -> None:
        """Remember that added zero units on this axis would change the result."""
        self.marks.append((tree, why))

    def pin(self, tree: Tree, reason: str = "") -> None:
        """Forbid every permutation along an axis; none matters where it is constant."""
        for leaf in leaves(self.resolve(tree)):
            if isinstance(leaf, Label):
                self._bound[leaf.number] = Fixed(leaf.size, reason or self.cause)

    def unify(self, one: Tree, other: Tree) -> None:
        """Give two axes of one size the same permutations; constant axes agree with any."""
        one, other = self.resolve(one), self.resolve(other)
        assert one.size == other.size, f"{one} and {other} differ in size"
        if one == other or isinstance(one, Same) or isinstance(other, Same):
            return
        match one, other:
            case Label(number), tree:
                self._bound[number] = self.thaw(tree)
            case tree, Label(number):
                self._bound[number] = self.thaw(tree)
            case (Fixed(_, reason), tree) | (tree, Fixed(_, reason)):
                self.pin(tree, reason)
            case (Parts(trees), tree) | (tree, Parts(trees)):
                pieces = self.cut(tree, [part.size for part in trees])
                for part, piece in zip(trees, pieces, strict=True):
                    self.unify(part, piece)
            case Factors(), Factors():
                self._unify_products(one, other)

    def _unify_products(self, one: Tree, other: Tree) -> None:
        """Match two products by their prefix products; what doesn't align is pinned."""
        first, second = self._head(one), self._head(other)
        if first.size > second.size:
            one, other, first, second = other, one, second, first
        halves = self._split_once(other, first.size)
        own = self._split_once(one, first.size)
        if halves is None or own is None:
            self.pin(one)
            self.pin(other)
            return
        self.unify(own[0], halves[0])
        self.unify(own[1], halves[1])

    def _head(self, tree: Tree) -> Tree:
        return tree.trees[0] if isinstance(tree, Factors) else tree

    def thaw(self, tree: Tree) -> Tree:
        """Return the tree with new labels in place of its constant parts."""
        match tree:
            case Same(_, size):
                return self.fresh(size)
            case Factors(trees):
                return product(self.thaw(child) for child in trees)
            case Parts(trees):
                return concat(self.thaw(child) for child in trees)
        return tree

    def renewed(self, tree: Tree) -> Tree:
        """Return the tree with new constant parts: a copy no longer shares what is written."""
        match tree:
            case Same(_, size):
                return self.same(size)
            case Factors(trees):
                return product(self.renewed(child) for child in trees)
            case Parts(trees):
                return concat(self.renewed(child) for child in trees)
        return tree

    def write(self, base: Axes, written: Axes) -> None:
        """Make constant axes of a storage ordinary ones, since a view of it is written to.

        An axis of the storage that the view does not show is no longer constant: it is pinned.
        """
        shown = {leaf for axis in written for leaf in leaves(self.resolve(axis))}
        for axis in base:
            found = dict.fromkeys(leaves(self.resolve(axis)))
            constant = [leaf for leaf in found if isinstance(leaf, Same)]
            seen = [leaf for leaf in constant if leaf in shown]
            for leaf in seen:
                self._bound[leaf.number] = self.fresh(leaf.size)
            if not seen:
                for leaf in constant:
                    self._bound[leaf.number] = Fixed(leaf.size, self.cause)

    def cut(self, tree: Tree, sizes: Sequence[int]) -> list[Tree]:
        """Return a tree as consecutive parts of the given sizes."""
        parts: list[Tree] = []
        for size in sizes[:-1]:
            head, tree = self._cut_once(tree, size)
            parts.append(head)
        assert tree.size == sizes[-1]
        return [*parts, tree]

    def _cut_once(self, tree: Tree, size: int) -> tuple[Tree, Tree]:
        """Return the first `size` positions of a tree, and the others."""
        tree = self.resolve(tree)
        rest = tree.size - size
        if size in (0, tree.size):
            return (tree, Fixed(0)) if size else (Fixed(0), tree)
        match tree:
            case Label(number):
                halves = self.fresh(size), self.fresh(rest)
                self._bound[number] = concat(halves)
                return halves
            case Same(number):
                halves = self.same(size), self.same(rest)
                self._bound[number] = concat(halves)
                return halves
            case Fixed(_, reason):
                return Fixed(size, reason), Fixed(rest, reason)
            case Parts(trees):
                return self._cut_parts(trees, size)
            case Factors(trees):
                return self._cut_product(trees[0], product(trees[1:]), size)

    def _cut_parts(self, trees: Sequence[Tree], size: int) -> tuple[Tree, Tree]:
        first, others = trees[0], concat(trees[1:])
        if size >= first.size:
            head, tail = self._cut_once(others, size - first.size)
            return concat((first, head)), tail
        head, tail = self._cut_once(first, size)
        return head, concat((tail, self.resolve(others)))

    def _cut_product(self, left: Tree, right: Tree, size: int) -> tuple[Tree, Tree]:
        """Cut the left factor; a cut inside one of its positions pins it and cuts that one."""
        whole, inside = divmod(size, right.size)
        if not inside:
            head, tail = self._cut_once(left, whole)
            right = self.resolve(right)
            return product((head, right)), product((tail, right))
        self.pin(left)
        right = self.resolve(right)
        head, tail = self._cut_once(right, inside)
        right = self.resolve(right)
        before = product((Fixed(whole), right)) if whole else Fixed(0)
        after = product((Fixed(left.size - whole - 1), right))
        return concat((before, head)), concat((tail, after if after.size else Fixed(0)))

    def split(self, tree: Tree, sizes: Sequence[int]) -> list[Tree]:
        """Return a tree as row-major factors of the given sizes; misaligned: all pinned."""
        factors: list[Tree] = []
        for position, size in enumerate(sizes[:-1]):
            halves = self._split_once(tree, size)
            if halves is None:
                for pinned in (tree, *factors):
                    self.pin(pinned)
                return [*factors, *(Fixed(s, self.cause) for s in sizes[position:])]
            factors.append(halves[0])
            tree = halves[1]
        return [*factors, tree]

    def _split_once(self, tree: Tree, size: int) -> tuple[Tree, Tree] | None:
        """Return a tree as `size × rest`, or nothing if it does not align."""
        tree = self.resolve(tree)
        rest, remainder = divmod(tree.size, size) if size else (0, 1)
        if remainder:
            return None
        if size in (1, tree.size):
            return (Fixed(1), tree) if size == 1 else (tree, Fixed(1))
        match tree:
            case Label(number):
                halves = self.fresh(size), self.fresh(rest)
                self._bound[number] = product(halves)
                return halves
            case Same(number):
                halves = self.same(size), self.same(rest)
                self._bound[number] = product(halves)
                return halves
            case Fixed(_, reason):
                return Fixed(size, reason), Fixed(rest, reason)
            case Parts(trees):
                return self._split_parts(trees, rest)
            case Factors(trees):
                return self._split_product(trees[0], product(trees[1:]), size)

    def _split_parts(self, trees: Sequence[Tree], rest: int) -> tuple[Tree, Tree] | None:
        """Split every part by the same right factor, which they then share."""
        if any(part.size % rest for part in trees):
            return None
        heads: list[Tree] = []
        tail: Tree = self.same(rest)
        for part in trees:
            halves = self._split_once(part, part.size // rest)
            if halves is None:
                return None
            heads.append(halves[0])
            tail = self.merge((tail, halves[1]))
        return self.resolve(concat(map(self.resolve, heads))), self.resolve(tail)

    def _split_product(self, left: Tree, right: Tree, size: int) -> tuple[Tree, Tree] | None:
        if size >= left.size:
            halves = self._split_once(right, size // left.size) if size % left.size == 0 else None
            return halves and (product((left, halves[0])), halves[1])
        halves = self._split_once(left, size)
        return halves and (halves[0], product((halves[1], self.resolve(right))))

    def merge(self, trees: Sequence[Tree]) -> Tree:
        """Unify axes of one size and return what an element-wise result has there."""
        trees = [self.resolve(tree) for tree in trees]
        known = [tree for tree in trees if not isinstance(tree, Same)]
        if not known:
            return trees[0]
        result = known[0] if len(known) == 1 else self.fresh(known[0].size)
        for tree in known:
            self.unify(result, tree)
        return self.resolve(result)
