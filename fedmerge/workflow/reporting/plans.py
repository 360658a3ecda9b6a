"""A plan as a picture's values: groups along the forward path, and what leads where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedmerge.report import Edge, PlanPicture, Stage
from fedmerge.types.plans import Plan, TensorPlan

INPUT = -1


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


def _edges(plan: Plan) -> Iterator[Edge]:
    """Yield what leads from group to group, each way once with all its tensors."""
    rows = {group.name: row for row, group in enumerate(plan.groups)}
    found: dict[tuple[int, int], list[str]] = {}
    for name, tensor in plan.tensors.items():
        if len(tensor.axes) < 2 or tensor.role == "pointwise":
            continue  # biases and norms stay within a group
        starts = [rows[group] for group in sorted(tensor.consumes)] or [INPUT]
        for start in starts:
            for end in _ends(tensor, rows):
                found.setdefault((start, end), []).append(name)
    for (start, end), tensors in found.items():
        yield Edge(start, end, tuple(tensors))


def _ends(tensor: TensorPlan, rows: Mapping[str, int]) -> list[int]:
    if tensor.makes_outputs:
        return [len(rows)]
    return [rows[group] for group in sorted(tensor.produces)]
