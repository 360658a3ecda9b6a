"""`fedmerge plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedmerge.api import plan
from fedmerge.architecture import plan_to_json
from fedmerge.cli.arguments import given_plan, match_options, model_code
from fedmerge.cli.output import Terminal
from fedmerge.merging.session import Session
from fedmerge.values import wording
from fedmerge.values.plans import Concat, Layout, Pinned, Plan, Product

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
    output, graph = given["output"], given["graph"]
    sessions: list[Session] = []
    with terminal.busy("reading clients"):
        planned = plan(
            given["clients"],
            match_options(given),
            given=given_plan(given),
            model=model_code(given),
            output=output,
            graph=graph,
            force=given["force"],
            prepared=sessions.append,
        )
    [session] = sessions
    for note in planned.notes:
        terminal.note(f"note: {note}")
    for warning in session.warnings:
        terminal.warn(warning)
    terminal.result(plan_to_json(planned))
    _show(session, terminal)
    if output is not None:
        terminal.line(f"wrote {output}; use it with: fedmerge match … --plan {output}")
    if graph is not None:
        terminal.line(f"drew {graph}")


def _show(session: Session, terminal: Terminal) -> None:
    planned = session.plan
    show_groups = _show_brief if terminal.is_drawn and not terminal.verbose else _show_full
    show_groups(session, terminal)
    for line in pinned_lines(planned, None if terminal.verbose else wording.MOST_LISTED):
        terminal.line(line)
    for tie in planned.same_width:
        terminal.line(f"equally wide: {', '.join(tie)}")
    for line in inner_lines(planned, None if terminal.verbose else wording.MOST_LISTED):
        terminal.line(line)
    for name in planned.kept:
        terminal.line(f"kept from {session.clients[0].name}: {name}")


def _show_full(session: Session, terminal: Terminal) -> None:
    """Print every group with all its axes, for other programs and for -v."""
    rows = []
    for group in session.plan.groups:
        axes = [f"{name}[{axis}]" for name, axis in session.plan.axes_of(group.name)]
        grows = "yes" if group.can_grow else group.why
        rows.append([group.name, _widths(session, group.name), grows, ", ".join(axes)])
    columns = ["group", "width", "can grow", "tensors[axis]"]
    terminal.table(_title(session.plan), columns, rows)


def _show_brief(session: Session, terminal: Terminal) -> None:
    """Print a table that fits a terminal, then why groups can't grow, each reason once."""
    rows, stuck = [], dict[str, list[str]]()
    for group in session.plan.groups:
        axes = sum(1 for _ in session.plan.axes_of(group.name))
        grows = "yes" if group.can_grow else "no"
        rows.append([group.name, _widths(session, group.name), grows, str(axes)])
        if not group.can_grow:
            stuck.setdefault(group.why, []).append(group.name)
    terminal.table(_title(session.plan), ["group", "width", "can grow", "axes"], rows)
    for why, names in stuck.items():
        terminal.line(f"can't grow ({why}): {wording.listed(names, wording.MOST_LISTED)}")


def _title(plan: Plan) -> str:
    groups = "1 group" if len(plan.groups) == 1 else f"{len(plan.groups)} groups"
    return f"{plan.architecture or 'plan'}: {groups}"


def _widths(session: Session, group: str) -> str:
    return wording.widths([widths[group] for widths in session.client_widths])


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


def inner_lines(plan: Plan, most: int | None) -> Iterator[str]:
    """Yield which groups have another order in every unit of another, or how many if many."""
    inner: dict[str, list[str]] = {}
    for group, outer in plan.inside.items():
        inner.setdefault(outer, []).append(group)
    if most is not None and len(inner) > most:
        yield f"in another order in every head: {len(plan.inside)} groups (-v lists them)"
        return
    for outer, groups in inner.items():
        yield f"in another order in each of {outer}: {', '.join(groups)}"


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
