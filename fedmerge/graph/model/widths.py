"""Widths of a plan's groups in a model, also where only a sum or a product of groups shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedmerge.types.layouts import Concat, Layout, Product, Units, groups_in, replace_groups
from fedmerge.types.plans import Group, Plan

WHY_UNSOLVED = "its width does not show in any shape"


def fix_widths(plan: Plan, widths: Mapping[str, int]) -> Plan:
    """Return the plan with groups tied or held until the tensors' shapes fix every width.

    Zero padding on both sides of a shortcut gives two groups of which only the sum shows: those
    are tied if they are equally wide. Else, and where only a product shows (heads × units per
    head), one is held at its width: one that can't grow anyway if possible, the outer one first.
    """
    while crowded := _crowded_axis(plan):
        layout, unsolved = crowded
        groups = [group for group in plan.groups if group.name in unsolved]
        one, other = sorted(groups, key=lambda group: -widths[group.name])[:2]
        is_sum = not _are_multiplied(layout, unsolved)
        if is_sum and widths[one.name] == widths[other.name]:
            plan = replace(plan, same_width=(*plan.same_width, (one.name, other.name)))
            continue
        held = next((g for g in groups if not g.can_grow), other if is_sum else groups[-1])
        plan = _with_group(plan, _held(held, widths[held.name]))
    return plan


def let_go(plan: Plan) -> Plan:
    """Return the plan without held widths, the groups free to grow that only those forbade."""
    groups = (
        Group(g.name) if g.why == WHY_UNSOLVED else replace(g, width=None) for g in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def _held(group: Group, width: int) -> Group:
    return replace(group, can_grow=False, why=group.why or WHY_UNSOLVED, width=width)


def _with_group(plan: Plan, changed: Group) -> Plan:
    groups = tuple(changed if group.name == changed.name else group for group in plan.groups)
    return replace(plan, groups=groups)


def _crowded_axis(plan: Plan) -> tuple[Layout, set[str]] | None:
    """Return an axis with several groups whose widths no shape fixes, and those groups."""
    first = _firsts(plan)
    layouts = [
        replace_groups(axis, lambda group: Units(first.get(group, group)))
        for tensor in plan.tensors.values()
        for axis in tensor.axes
    ]
    axes = [(layout, set(groups_in(layout))) for layout in layouts]
    known = {first.get(group.name, group.name) for group in plan.groups if group.width}
    while fixed := {g for _, groups in axes if len(groups - known) == 1 for g in groups - known}:
        known |= fixed
    return next(((axis, groups - known) for axis, groups in axes if groups - known), None)


def _are_multiplied(layout: Layout, groups: set[str]) -> bool:
    """Return whether several factors of a product in a layout have such groups."""
    match layout:
        case Product(children):
            if sum(bool(groups.intersection(groups_in(child))) for child in children) > 1:
                return True
        case Concat(children):
            pass
        case _:
            return False
    return any(_are_multiplied(child, groups) for child in children)


def _firsts(plan: Plan) -> dict[str, str]:
    """Return for every tied group the one that stands for all groups tied to it."""
    first: dict[str, str] = {}
    for tie in plan.same_width:
        joined = {first.get(group, group) for group in tie}
        chosen = first.get(tie[0], tie[0])
        first.update(dict.fromkeys(tie, chosen))
        first.update({group: chosen for group, old in first.items() if old in joined})
    return first
