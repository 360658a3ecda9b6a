"""A plan as a picture's values: groups along the forward path, and what leads where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from fedmerge.report import Edge, PlanPicture, Stage
from fedmerge.types.plans import Plan, TensorPlan

INPUT = -1
CONVOLUTION = 4  # axes of a weight: units, inputs, height, width
_Ways: TypeAlias = dict[tuple[int, int], list[str]]  # from row to row, by which tensors


def plan_picture(
    plan: Plan,
    client_widths: Mapping[str, Sequence[int]],
    widths: Mapping[str, int] | None = None,
) -> PlanPicture:
    """Return the picture of a plan, given group → the clients' widths, and the global ones."""
    stages = tuple(
        Stage(
            name=group.name,
            client_widths=tuple(client_widths[group.name]),
            width=None if widths is None else widths[group.name],
            why_fixed="" if group.can_grow else group.why or "it can't grow",
        )
        for group in plan.groups
    )
    return PlanPicture(plan.architecture or "Plan", stages, tuple(_edges(plan)))


def has_convolution(plan: Plan) -> bool:
    """Return whether a convolution makes matched units, so that images can be seen by them."""
    return any(is_convolution(tensor) for tensor in plan.tensors.values())


def is_convolution(tensor: TensorPlan) -> bool:
    """Return whether a tensor is a convolution's weight that makes the units of a group alone."""
    is_weight = tensor.role == "weight" and len(tensor.axes) == CONVOLUTION and tensor.out == 0
    return is_weight and len(tensor.produces) == 1


def _edges(plan: Plan) -> Iterator[Edge]:
    """Yield what leads from group to group, each way once with all its tensors."""
    rows = {group.name: row for row, group in enumerate(plan.groups)}
    found: _Ways = {}
    for name, tensor in plan.tensors.items():
        if len(tensor.axes) < 2 or tensor.role == "pointwise":
            continue  # biases and norms stay within a group
        starts = [rows[group] for group in sorted(tensor.consumes)] or [INPUT]
        for start in starts:
            for end in _ends(tensor, rows):
                found.setdefault((start, end), []).append(name)
    if not any(end == len(rows) for _, end in found):
        found |= _tied_outputs(found, len(rows))
    for (start, end), tensors in found.items():
        yield Edge(start, end, tuple(tensors))


def _tied_outputs(found: _Ways, output: int) -> _Ways:
    """Return the ways to the output where no tensor of its own makes it.

    Then one that reads the input does, from the group that it makes: a tied embedding.
    """
    return {(end, output): tensors for (start, end), tensors in found.items() if start == INPUT}


def _ends(tensor: TensorPlan, rows: Mapping[str, int]) -> list[int]:
    if tensor.makes_outputs:
        return [len(rows)]
    return [rows[group] for group in sorted(tensor.produces)]
