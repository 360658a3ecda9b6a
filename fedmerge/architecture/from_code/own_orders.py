"""Which units may have an order of their own in every unit around them, as those of a head may."""

from __future__ import annotations

from collections.abc import Mapping

from fedmerge.architecture.from_code.labels import (
    Axes,
    Factors,
    Label,
    Parts,
    Tree,
    labels_of,
)
from fedmerge.architecture.from_code.trace import Summed, Trace
from fedmerge.values.nesting import possible_outers
from fedmerge.values.plans import Plan


def own_orders(plan: Plan, trace: Trace, names: Mapping[Label, str]) -> dict[str, str]:
    """Return the groups that may have own orders in the units of another one (group → that).

    They stand inside it on every axis of the tensors, no value of the run has them without it or
    beside two of it, and no product adds them up over it, or it over them.
    """
    wanted = {group: outers[0] for group, outers in possible_outers(plan).items() if outers}
    if not wanted:
        return {}
    labels = {name: label for label, name in names.items()}
    values = _values_by_label(trace)
    sums = [summed.resolved(trace.labels) for summed in trace.sums]

    def stay_together(inner: Label, outer: Label) -> bool:
        return all(_is_beside(inner, outer, axes) for axes in values.get(inner, ())) and not any(
            _mixes(inner, outer, summed) for summed in sums
        )

    return {g: outer for g, outer in wanted.items() if stay_together(labels[g], labels[outer])}


def _values_by_label(trace: Trace) -> dict[Label, list[Axes]]:
    """Return what every label stands beside in the values of the runs, each kind of value once."""
    resolved: dict[int, Tree] = {}  # by the trees' identities: most are in many values
    found: dict[tuple[int, ...], Axes] = {}
    for axes in trace.made:
        for axis in axes:
            if id(axis) not in resolved:
                resolved[id(axis)] = trace.labels.resolve(axis)
        found[tuple(map(id, axes))] = tuple([resolved[id(axis)] for axis in axes])
    known = {id(tree): set(labels_of(tree)) for tree in resolved.values()}
    values: dict[Label, list[Axes]] = {}
    for axes in found.values():
        for label in set().union(*[known[id(tree)] for tree in axes]):
            values.setdefault(label, []).append(axes)
    return values


def _is_beside(inner: Label, outer: Label, axes: Axes) -> bool:
    """Return whether one outer unit goes with every inner one: on its axis, or on one other."""
    bare = [axis for axis in axes if not _is_under(inner, outer, axis)]
    around = sum(labels_of(axis).count(outer) for axis in axes)
    return not bare or (around == 1 and not any(outer in labels_of(axis) for axis in bare))


def _is_under(inner: Label, outer: Label, tree: Tree) -> bool:
    """Return whether all inner units of an axis stand inside outer ones there."""
    match tree:
        case Factors(trees):
            for factor in trees:
                if factor == outer:
                    return True
                if not _is_under(inner, outer, factor):
                    return False
            return True
        case Parts(trees):
            return all(_is_under(inner, outer, part) for part in trees)
    return tree != inner


def _mixes(inner: Label, outer: Label, summed: Summed) -> bool:
    """Return whether a product adds up inner units of different outer ones, or makes it so."""
    over = labels_of(summed.over)
    if outer in over and any(not _is_under(inner, outer, axis) for axis in summed.kept):
        return True
    is_bare = not _is_under(inner, outer, summed.over)
    return is_bare and any(outer in labels_of(axis) for axis in summed.paired)
