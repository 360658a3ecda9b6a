"""Widths of a plan's groups from the shapes of one client's tensors."""

from collections import ChainMap, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from fedmerge.errors import ArchitectureError
from fedmerge.types.layouts import (
    Concat,
    Layout,
    Pinned,
    Product,
    Units,
    axis_size,
    groups_in,
    replace_groups,
)
from fedmerge.types.plans import Plan

Shapes = Mapping[str, tuple[int, ...]]
_Axis = tuple[str, int, Layout, int]  # tensor, axis, layout, size
_SAME_NET = "all clients must share one architecture; compare them with `fedmerge inspect`"


def solve_widths(plan: Plan, shapes: Shapes, *, source: str) -> dict[str, int]:
    """Return every group's width in a client, or say which axis of it contradicts the plan.

    Groups that must be equally wide are solved as one: of two halves only the sum may show. Of a
    product of two groups only the whole shows, so the plan gives one group's width.
    """
    first = {group: tie[0] for tie in plan.same_width for group in tie}
    given = {first.get(g.name, g.name): g.width for g in plan.groups if g.width is not None}
    solved = _solve_groups(_with_names(plan, first), given, shapes, source)
    return {group.name: solved[first.get(group.name, group.name)] for group in plan.groups}


def _with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan with groups renamed; groups of one name are one."""

    def renamed(group: str) -> Layout:
        return Units(names.get(group, group))

    tensors = {
        name: replace(tensor, axes=tuple(replace_groups(axis, renamed) for axis in tensor.axes))
        for name, tensor in plan.tensors.items()
    }
    groups = tuple(g for g in plan.groups if names.get(g.name, g.name) == g.name)
    return replace(plan, groups=groups, tensors=tensors)


def _solve_groups(
    plan: Plan, given: Mapping[str, int], shapes: Shapes, source: str
) -> dict[str, int]:
    _check_dimensions(plan, shapes, source)
    axes: list[_Axis] = [
        (name, axis, layout, shapes[name][axis])
        for name, tensor in plan.tensors.items()
        for axis, layout in enumerate(tensor.axes)
    ]
    widths = _solved_widths(axes, given)
    _check_solved(plan, widths, axes, source)
    for name, axis, layout, size in axes:
        if axis_size(layout, widths) != size:
            raise ArchitectureError(
                f"{source}: '{name}' has size {size} along axis {axis}, "
                f"expected {describe(layout, widths)}",
                _SAME_NET,
            )
    return widths


def _solved_widths(axes: Sequence[_Axis], given: Mapping[str, int]) -> dict[str, int]:
    """Return the widths that follow from axes with one unknown group, and from one another."""
    widths = dict(given)
    unknown = [set(groups_in(layout)) - given.keys() for _, _, layout, _ in axes]
    carriers: dict[str, list[int]] = {}
    for number, groups in enumerate(unknown):
        for group in groups:
            carriers.setdefault(group, []).append(number)
    waiting = deque(range(len(axes)))
    while waiting:
        number = waiting.popleft()
        _, _, layout, size = axes[number]
        width = _solve(layout, size, widths) if len(unknown[number]) == 1 else None
        if width is None:
            continue
        [solved] = unknown[number]
        widths[solved] = width
        for other in carriers[solved]:
            unknown[other].discard(solved)
            waiting.append(other)
    return widths


def describe(layout: Layout, widths: Mapping[str, int]) -> str:
    """Return an axis's expected size in words, e.g. `800 (conv2's 50 units × 16)`."""
    size = axis_size(layout, widths)
    return f"{size} ({_words(layout, widths)})"


def _words(layout: Layout, widths: Mapping[str, int]) -> str:
    match layout:
        case Units(group):
            return f"{group}'s {widths[group]} units" if group in widths else f"{group}'s units"
        case Pinned(size, reason):
            return f"{reason} {size}" if reason else str(size)
        case Product(factors):
            return " × ".join(_words(factor, widths) for factor in factors)
        case Concat(parts):
            return " + ".join(_words(part, widths) for part in parts)


def _solve(layout: Layout, size: int, widths: dict[str, int]) -> int | None:
    """Return the one unknown group's width that gives the axis its size, if there is one.

    The size is linear in the width, so two evaluations fix it.
    """
    unknown = next(group for group in groups_in(layout) if group not in widths)
    at_zero = axis_size(layout, ChainMap({unknown: 0}, widths))
    slope = axis_size(layout, ChainMap({unknown: 1}, widths)) - at_zero
    if slope <= 0 or (size - at_zero) % slope or size <= at_zero:
        return None
    return (size - at_zero) // slope


def _check_dimensions(plan: Plan, shapes: Shapes, source: str) -> None:
    for name, tensor in plan.tensors.items():
        if name not in shapes:
            raise ArchitectureError(
                f"{source}: has no tensor '{name}', which the plan describes",
                "a plan must name the tensors of the files it is used for; see `fedmerge inspect`",
            )
        if len(shapes[name]) != len(tensor.axes):
            raise ArchitectureError(
                f"{source}: '{name}' has {len(shapes[name])} axes, expected {len(tensor.axes)}",
                _SAME_NET,
            )


def _check_solved(
    plan: Plan, widths: Mapping[str, int], axes: Sequence[_Axis], source: str
) -> None:
    """Refuse a plan with groups left unsolved: no width of theirs fits, or several would."""
    unsolved = {group.name: None for group in plan.groups if group.name not in widths}
    for name, axis, layout, size in axes:
        if len({group for group in groups_in(layout) if group in unsolved}) == 1:
            raise ArchitectureError(
                f"{source}: '{name}' has size {size} along axis {axis}, "
                f"which is no {_words(layout, widths)}",
                _SAME_NET,
            )
    if unsolved:
        raise ArchitectureError(
            f"the plan does not fix the width of group '{next(iter(unsolved))}'",
            "give the group a tensor axis of its own, or its 'width' in the plan's 'groups'",
        )


def count_parameters(plan: Plan, widths: Mapping[str, int]) -> int:
    """Return how many numbers the plan's tensors hold at the given widths."""
    return sum(
        reduce(lambda count, axis: count * axis_size(axis, widths), tensor.axes, 1)
        for tensor in plan.tensors.values()
    )
