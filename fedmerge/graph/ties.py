"""Tied tensors are one tensor: the layouts of all its names must agree."""

from collections.abc import Mapping
from dataclasses import replace

from fedmerge.errors import ArchitectureError
from fedmerge.graph.layers import MODEL_HINT
from fedmerge.types.layouts import Layout, Pinned, Units, replace_groups
from fedmerge.types.plans import Plan, pin_groups


def tie_tensors(plan: Plan, aliases: Mapping[str, str]) -> Plan:
    """Return the plan without the aliases, their groups made one with those of the tensors."""
    for alias, name in aliases.items():
        for axis in range(len(plan.tensors[name].axes)):
            tensor, twin = plan.tensors[name], plan.tensors[alias]
            plan = _unify(plan, tensor.axes[axis], twin.axes[axis], f"'{name}' and '{alias}'")
        others = {key: tensor for key, tensor in plan.tensors.items() if key != alias}
        plan = replace(plan, tensors=others)
    return plan


def _unify(plan: Plan, one: Layout, other: Layout, what: str) -> Plan:
    match one, other:
        case Units(group), Units(twin):
            return plan if group == twin else _merge_groups(plan, group, twin)
        case (Units(group), Pinned(size, reason)) | (Pinned(size, reason), Units(group)):
            return pin_groups(plan, {group: size}, reason)
        case Pinned(size), Pinned(twin_size) if size == twin_size:
            return plan
    if one == other:
        return plan
    raise ArchitectureError(f"{what} are one tied tensor used in two different ways", MODEL_HINT)


def _merge_groups(plan: Plan, group: str, twin: str) -> Plan:
    """Return the plan with both groups under the name of the one that comes first."""
    names = [g.name for g in plan.groups]
    first, second = sorted((group, twin), key=names.index)

    def renamed(name: str) -> Layout:
        return Units(first if name == second else name)

    tensors = {
        key: replace(tensor, axes=tuple(replace_groups(axis, renamed) for axis in tensor.axes))
        for key, tensor in plan.tensors.items()
    }
    merged, absorbed = plan.group(first), plan.group(second)
    merged = merged if not merged.can_grow else replace(absorbed, name=first)
    groups = tuple(merged if g.name == first else g for g in plan.groups if g.name != second)
    ties = tuple(tuple(first if g == second else g for g in tie) for tie in plan.same_width)
    return replace(plan, groups=groups, tensors=tensors, same_width=ties)
