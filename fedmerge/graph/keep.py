"""Tensors that are taken from the first client as they are pin the units that they touch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedmerge.types.clients import TensorInfo
from fedmerge.types.layouts import axis_size, groups_in
from fedmerge.types.plans import Plan, pin_groups

KEPT = "kept"


def keep_tensors(
    plan: Plan, kept: Sequence[str], *, tensors: Mapping[str, TensorInfo], widths: Mapping[str, int]
) -> Plan:
    """Return the plan without the kept tensors, the groups on their axes pinned.

    A kept tensor that the plan does not describe pins every group as wide as one of its axes, and
    all on an axis as long as one of its own: nothing says which of them it touches.
    """
    touched: set[str] = set()
    layouts = [axis for tensor in plan.tensors.values() for axis in tensor.axes]
    for name in kept:
        if name in plan.tensors:
            touched |= {g for axis in plan.tensors[name].axes for g in groups_in(axis)}
        else:
            shape = tensors[name].shape
            touched |= {g for g, width in widths.items() if width in shape}
            alike = (layout for layout in layouts if axis_size(layout, widths) in shape)
            touched |= {g for layout in alike for g in groups_in(layout)}
    pinned = pin_groups(plan, {group: widths[group] for group in touched}, KEPT)
    others = {name: tensor for name, tensor in pinned.tensors.items() if name not in kept}
    norms = tuple(norm for norm in pinned.norms if not set(vars(norm).values()) & set(kept))
    notes = [*plan.notes]
    if touched:
        groups = ", ".join(sorted(touched))
        notes.append(f"kept tensors pin {groups}: averaged position by position, not matched")
    return replace(
        pinned, tensors=others, norms=norms, kept=(*plan.kept, *kept), notes=tuple(notes)
    )
