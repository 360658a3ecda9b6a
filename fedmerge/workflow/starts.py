"""Clients that began with the same weights: most of their units match at the same places."""

from __future__ import annotations

from collections.abc import Mapping

from fedmerge.matching import GroupMatching

FEWEST = 16  # matched units from which on it can be told from chance
SHARED = 0.5  # of them at the same places; of clients trained apart it is one or two of a layer
NEARLY_ALL = 0.999  # from here on nothing is gained by matching: the average is as good or better


def in_place(matchings: Mapping[str, GroupMatching]) -> float | None:
    """Return the share of units matched with the first client's that stand at the same place there.

    Weights tell it: they are near each other only where training began alike. None if units are
    too few.
    """
    pairs = same = 0
    for matching in matchings.values():
        first, *others = (assignment.indices.tolist() for assignment in matching.assignments)
        places = {unit: place for place, unit in enumerate(first)}
        found = [[places.get(unit) for unit in units] for units in others]
        pairs += sum(place is not None for own in found for place in own)
        same += sum(place == number for own in found for number, place in enumerate(own))
    return same / pairs if pairs >= FEWEST else None
