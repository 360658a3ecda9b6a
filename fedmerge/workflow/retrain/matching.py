"""Match the units of one round by the tensors that the round exchanges."""

from __future__ import annotations

from dataclasses import replace

from fedmerge.matching import GroupMatching
from fedmerge.types.layouts import Widths
from fedmerge.types.plans import Plan
from fedmerge.workflow.layers import Problem, is_same, match_group
from fedmerge.workflow.retrain.locals import same_units
from fedmerge.workflow.retrain.schedule import Layer


def match_layer(
    problem: Problem, layer: Layer, matched: Widths, limit: int | None
) -> GroupMatching:
    """Match a layer's group of clients whose `matched` groups have the same units already.

    Incoming weights decide first. Tensors of the layer that both make and read the group (recurrent
    weights) can be compared only around a matching, so the group is matched with them again, up to
    `refine` times, until nothing changes. Where its width is limited it does not grow any more.
    """
    assert layer.group is not None
    number = [group.name for group in problem.plan.groups].index(layer.group)
    earlier = _same_matchings(matched, len(problem.clients))
    found = match_group(problem, number, earlier, limit, progress=lambda share: None)
    exchanged = replace(problem, plan=exchanged_plan(problem.plan, layer))
    for _ in range(problem.dials.refine if _feeds_itself(exchanged.plan, layer.group) else 0):
        before = found
        found = match_group(
            exchanged,
            number,
            {**earlier, layer.group: before},
            None if limit is None else before.width,
            outgoing=True,
            progress=lambda share: None,
        )
        if is_same(found, before):
            break
    return found


def exchanged_plan(plan: Plan, layer: Layer) -> Plan:
    """Return the plan with those tensors alone that the layer's round exchanges."""
    return replace(plan, tensors={name: plan.tensors[name] for name in layer.tensors})


def _feeds_itself(plan: Plan, group: str) -> bool:
    """Whether a tensor both makes and reads the units of a group."""
    return any(group in t.produces & t.consumes for t in plan.tensors.values())


def _same_matchings(widths: Widths, clients: int) -> dict[str, GroupMatching]:
    """Return the matchings of groups along which all clients have the same units already."""
    return {
        name: GroupMatching((same_units(width),) * clients, width, 0, 0.0)
        for name, width in widths.items()
    }
