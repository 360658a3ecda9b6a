"""Widths of a plan's groups in a model, also where only the sum of two groups shows in a shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedmerge.types.layouts import groups_in
from fedmerge.types.plans import Plan, pin_groups

WHY_UNSOLVED = "its width does not show in any shape"


def fix_widths(plan: Plan, widths: Mapping[str, int]) -> Plan:
    """Return the plan with groups tied or pinned until the tensors' shapes fix every width.

    Zero padding on both sides of a shortcut gives two groups of which only the sum shows: those
    are tied if they are equally wide, else the narrower one is pinned.
    """
    while unsolved := _unsolved(plan):
        one, other, *_ = sorted(unsolved, key=lambda group: -widths[group])
        if widths[one] == widths[other]:
            plan = replace(plan, same_width=(*plan.same_width, (one, other)))
        else:
            plan = pin_groups(plan, {other: widths[other]}, WHY_UNSOLVED)
    return plan


def _unsolved(plan: Plan) -> list[str]:
    """Return the groups of an axis with several whose widths no shape fixes."""
    first = _firsts(plan)
    axes = [
        {first.get(group, group) for group in groups_in(axis)}
        for tensor in plan.tensors.values()
        for axis in tensor.axes
    ]
    known: set[str] = set()
    while fixed := {group for axis in axes if len(axis - known) == 1 for group in axis - known}:
        known |= fixed
    crowded = next((axis - known for axis in axes if axis - known), set())
    return sorted(crowded)


def _firsts(plan: Plan) -> dict[str, str]:
    """Return for every tied group the one that stands for all groups tied to it."""
    first: dict[str, str] = {}
    for tie in plan.same_width:
        joined = {first.get(group, group) for group in tie}
        chosen = first.get(tie[0], tie[0])
        first.update(dict.fromkeys(tie, chosen))
        first.update({group: chosen for group, old in first.items() if old in joined})
    return first
