"""Match units that have an order of their own in every unit around them: those of a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedmerge.matching.group_matching import keep_apart
from fedmerge.matching.scores import GroupMatching, UnitFeatures
from fedmerge.values.arrays import Float64Array, IntArray
from fedmerge.values.plans import Assignment


@dataclass(frozen=True)
class _Owned:
    """One global outer unit: the outer units that became it, and how their inner units match."""

    owners: tuple[tuple[int, int], ...]  # (client, its outer unit)
    matching: GroupMatching
    weight: float  # sum of the squared features


def match_inside(
    units: Sequence[UnitFeatures],
    outer: Sequence[Assignment],
    match: Callable[[Sequence[UnitFeatures]], GroupMatching],
) -> GroupMatching:
    """Match, in every global outer unit, the inner units of the outer units that became it.

    `units` are every client's inner units (outer units × units, features), `outer` where its outer
    units went; `match` matches the inner units of some of them. The width is the widest one's.
    """
    found = [_matched(units, outer, number, match) for number in range(outer[0].width)]
    width = max(owned.matching.width for owned in found)
    total = sum(owned.weight for owned in found)
    parts = [_parts_of(found, client) for client in range(len(units))]
    return GroupMatching(
        assignments=tuple(Assignment(np.stack([p.indices for p in own]), width) for own in parts),
        width=width,
        sweeps=max(owned.matching.sweeps for owned in found),
        scatter=sum(o.weight * o.matching.scatter for o in found) / total if total else 0.0,
        similarities=tuple(np.concatenate([part.cosines for part in own]) for own in parts),
        outer=tuple(outer),
    )


def _matched(
    units: Sequence[UnitFeatures],
    outer: Sequence[Assignment],
    number: int,
    match: Callable[[Sequence[UnitFeatures]], GroupMatching],
) -> _Owned:
    """Return the matching inside one global outer unit."""
    owners = tuple(
        (client, int(own))
        for client, assignment in enumerate(outer)
        for own in np.flatnonzero(assignment.indices == number)
    )
    features = [_rows(units[client], own, len(outer[client].indices)) for client, own in owners]
    alone = len(owners) < 2
    matching = keep_apart([each.count for each in features]) if alone else match(features)
    return _Owned(owners, matching, sum(float(each.squares.sum()) for each in features))


def _rows(features: UnitFeatures, number: int, count: int) -> UnitFeatures:
    """Return the inner units of one of so many outer units."""
    width = features.count // count
    rows = slice(number * width, (number + 1) * width)
    return replace(features, weights=features.weights[rows], ties=features.ties[rows])


@dataclass(frozen=True)
class _Part:
    """What became of the inner units of one of a client's outer units."""

    indices: IntArray  # (units,)
    cosines: Float64Array  # (units,) with the fellow owners' mean, NaN where there are none


def _parts_of(found: Sequence[_Owned], client: int) -> list[_Part]:
    """Return what became of a client's inner units, by its outer units."""
    parts: dict[int, _Part] = {}
    for owned in found:
        matching = owned.matching
        for place, (owner, own) in enumerate(owned.owners):
            if owner == client:
                indices = matching.assignments[place].indices
                unknown = np.full(len(indices), np.nan)
                cosines = matching.similarities[place] if matching.similarities else unknown
                parts[own] = _Part(indices, cosines)
    return [parts[own] for own in sorted(parts)]
