"""`fedmerge plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedmerge.checkpoint import check_targets, expand_paths, readable, write_text
from fedmerge.cli import show
from fedmerge.cli.arguments import given_plan, match_options, model_code
from fedmerge.cli.terminal import Terminal
from fedmerge.graph import plan_to_json
from fedmerge.types.layouts import Concat, Layout, Pinned, Product
from fedmerge.types.plans import Plan
from fedmerge.workflow.clients import open_clients
from fedmerge.workflow.prepared import Prepared, prepare
from fedmerge.workflow.reporting.graph import check_picture, draw_graph

PINNING_OPS: Mapping[str, str] = {  # where a reason is no op's name
    "pixels": "convolution or pooling",
    "tokens": "embedding",
    "triangle": "tril or triu",
    "causal": "scaled_dot_product_attention",
    "groups of a norm": "group_norm",
}
UNSAID_PARTS = frozenset({"gates", "pixels"})


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Show the plan of the clients, and write it if asked to."""
    output: Path | None = given["output"]
    paths = expand_paths(given["clients"])
    if output is not None:
        check_targets([output], inputs=paths, force=given["force"])
    graph: Path | None = given["graph"]
    if graph is not None:
        check_picture(graph, "--graph", inputs=paths, force=given["force"])
    options = match_options(given)
    plan, code = given_plan(given), model_code(given)
    with terminal.busy("reading clients"):
        prepared = prepare(open_clients(paths, options.reading), options, plan=plan, model=code)
    value = plan_to_json(prepared.plan)
    if output is not None:
        write_text(output, readable(value), force=given["force"])
    if graph is not None:
        draw_graph(prepared, graph, force=given["force"])
    for note in prepared.plan.notes:
        terminal.note(f"note: {note}")
    for warning in prepared.warnings:
        terminal.warn(warning)
    terminal.result(value)
    _show(prepared, terminal)
    if output is not None:
        terminal.line(f"wrote {output}; use it with: fedmerge match … --plan {output}")
    if graph is not None:
        terminal.line(f"drew {graph}")


def _show(prepared: Prepared, terminal: Terminal) -> None:
    plan = prepared.plan
    show_groups = _show_brief if terminal.is_drawn and not terminal.verbose else _show_full
    show_groups(prepared, terminal)
    for line in pinned_lines(plan, None if terminal.verbose else show.MOST_LISTED):
        terminal.line(line)
    for tie in plan.same_width:
        terminal.line(f"equally wide: {', '.join(tie)}")
    for name in plan.kept:
        terminal.line(f"kept from {prepared.clients[0].name}: {name}")


def _show_full(prepared: Prepared, terminal: Terminal) -> None:
    """Print every group with all its axes, for other programs and for -v."""
    rows = []
    for group in prepared.plan.groups:
        axes = [f"{name}[{axis}]" for name, axis in prepared.plan.axes_of(group.name)]
        grows = "yes" if group.can_grow else group.why
        rows.append([group.name, _widths(prepared, group.name), grows, ", ".join(axes)])
    columns = ["group", "width", "can grow", "tensors[axis]"]
    terminal.table(_title(prepared.plan), columns, rows)


def _show_brief(prepared: Prepared, terminal: Terminal) -> None:
    """Print a table that fits a terminal, then why groups can't grow, each reason once."""
    rows, stuck = [], dict[str, list[str]]()
    for group in prepared.plan.groups:
        axes = sum(1 for _ in prepared.plan.axes_of(group.name))
        grows = "yes" if group.can_grow else "no"
        rows.append([group.name, _widths(prepared, group.name), grows, str(axes)])
        if not group.can_grow:
            stuck.setdefault(group.why, []).append(group.name)
    terminal.table(_title(prepared.plan), ["group", "width", "can grow", "axes"], rows)
    for why, names in stuck.items():
        terminal.line(f"can't grow ({why}): {show.listed(names, show.MOST_LISTED)}")


def _title(plan: Plan) -> str:
    groups = "1 group" if len(plan.groups) == 1 else f"{len(plan.groups)} groups"
    return f"{plan.architecture or 'plan'}: {groups}"


def _widths(prepared: Prepared, group: str) -> str:
    return show.widths([widths[group] for widths in prepared.client_widths])


def pinned_lines(plan: Plan, most: int | None) -> Iterator[str]:
    """Yield one line per reason with the axes whose order it fixes, or their number if many."""
    for reason, tensors in _pinned(plan).items():
        names = [f"{name}[{','.join(map(str, axes))}]" for name, axes in tensors.items()]
        if most is not None and len(names) > most:
            shown = (
                f"{sum(map(len, tensors.values()))} axes of {len(names)} tensors (-v lists them)"
            )
        else:
            shown = ", ".join(names)
        yield f"pinned ({reason}{_op_of(reason)}): {shown}"


def _op_of(reason: str) -> str:
    """Return which op pinned, where the reason does not say so itself."""
    return f", by {PINNING_OPS[reason]}" if reason in PINNING_OPS else ""


def _pinned(plan: Plan) -> dict[str, dict[str, list[int]]]:
    """Return the axes whose order is fixed, wholly or in part, by reason and tensor."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, tensor in plan.tensors.items():
        for axis, layout in enumerate(tensor.axes):
            for reason in dict.fromkeys(_reasons(layout)):
                found.setdefault(reason, {}).setdefault(name, []).append(axis)
    return found


def _reasons(layout: Layout) -> Iterator[str]:
    """Yield why an axis is pinned; gates and pixels beside units go without saying."""
    match layout:
        case Pinned(_, reason) if reason:
            yield reason
        case Product(children) | Concat(children):
            inner = (reason for child in children for reason in _reasons(child))
            yield from (reason for reason in inner if reason not in UNSAID_PARTS)
