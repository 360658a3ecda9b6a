"""Tied tensors are one tensor: the layouts of all its names must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fedmerge.errors import ArchitectureError
from fedmerge.graph.layers import MODEL_HINT
from fedmerge.types.layouts import Concat, Layout, Pinned, Product, Units, replace_groups
from fedmerge.types.plans import Norm, Plan, pin_groups


def tie_tensors(plan: Plan, aliases: Mapping[str, str]) -> Plan:
    """Return the plan without the aliases, their groups made one with those of the tensors.

    Aliases of tensors that are not planned (integer counters) say nothing.
    """
    planned = {a: name for a, name in aliases.items() if {a, name} <= plan.tensors.keys()}
    for alias, name in planned.items():
        while pair := _first_difference(plan.tensors[name].axes, plan.tensors[alias].axes):
            plan = _unify(plan, *pair, f"'{name}' and '{alias}'")
    tensors = {name: tensor for name, tensor in plan.tensors.items() if name not in planned}
    return replace(plan, tensors=tensors, norms=_renamed_norms(plan.norms, planned))


def _renamed_norms(norms: Iterable[Norm], aliases: Mapping[str, str]) -> tuple[Norm, ...]:
    """Return the norms under their tensors' first names, without those that share a part."""
    renamed = dict.fromkeys(
        Norm(**{key: aliases.get(value, value) for key, value in vars(norm).items()})
        for norm in norms
    )
    producers = Counter(norm.producer for norm in renamed)
    statistics = Counter(norm.mean for norm in renamed)
    return tuple(n for n in renamed if producers[n.producer] == statistics[n.mean] == 1)


def _first_difference(
    axes: tuple[Layout, ...], others: tuple[Layout, ...]
) -> tuple[Layout, Layout] | None:
    """Return the first two parts in which the layouts differ in more than a reason."""
    for one, other in zip(axes, others, strict=True):
        match one, other:
            case Pinned(size), Pinned(twin) if size == twin:
                continue
            case (Product(a), Product(b)) | (Concat(a), Concat(b)) if len(a) == len(b):
                if pair := _first_difference(a, b):
                    return pair
            case _ if one != other:
                return one, other
    return None


def _unify(plan: Plan, one: Layout, other: Layout, what: str) -> Plan:
    match one, other:
        case Units(group), Units(twin):
            return _merge_groups(plan, group, twin)
        case (Units(group), Pinned(size, reason)) | (Pinned(size, reason), Units(group)):
            return pin_groups(plan, {group: size}, reason)
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
    same_width = (
        tuple(dict.fromkeys(first if g == second else g for g in tie)) for tie in plan.same_width
    )
    ties = tuple(tie for tie in same_width if len(tie) > 1)
    return replace(plan, groups=groups, tensors=tensors, same_width=ties)
