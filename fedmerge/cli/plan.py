"""`fedmerge plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmerge.checkpoint import check_targets, expand_paths, readable, write_text
from fedmerge.cli import show
from fedmerge.cli.arguments import given_plan, match_options, model_code
from fedmerge.cli.terminal import Terminal
from fedmerge.graph import plan_to_json
from fedmerge.types.layouts import Pinned
from fedmerge.types.plans import Plan
from fedmerge.workflow.clients import open_clients
from fedmerge.workflow.match import Prepared, prepare


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Show the plan of the clients, and write it if asked to."""
    output: Path | None = given["output"]
    paths = expand_paths(given["clients"])
    if output is not None:
        check_targets([output], inputs=paths, force=given["force"])
    options = match_options(given)
    clients = open_clients(paths, options.reading)
    plan = given_plan(given)
    prepared = prepare(clients, options, plan=plan, model=model_code(given))
    value = plan_to_json(prepared.plan)
    if output is not None:
        write_text(output, readable(value))
    for note in prepared.plan.notes:
        terminal.note(f"note: {note}")
    for warning in prepared.warnings:
        terminal.warn(warning)
    terminal.result(value)
    _show(prepared, terminal)
    if output is not None:
        terminal.line(f"wrote {output}; use it with: fedmerge match … --plan {output}")


def _show(prepared: Prepared, terminal: Terminal) -> None:
    rows = []
    for group in prepared.plan.groups:
        own = [widths[group.name] for widths in prepared.client_widths]
        axes = ", ".join(f"{name}[{axis}]" for name, axis in prepared.plan.axes_of(group.name))
        rows.append([group.name, show.widths(own), "yes" if group.can_grow else group.why, axes])
    title = f"{prepared.plan.architecture or 'plan'}: {len(rows)} groups"
    terminal.table(title, ["group", "width", "can grow", "tensors[axis]"], rows)
    for reason, pinned in _pinned(prepared.plan).items():
        terminal.line(f"pinned ({reason}): {', '.join(pinned)}")
    for tie in prepared.plan.same_width:
        terminal.line(f"equally wide: {', '.join(tie)}")
    for name in prepared.plan.kept:
        terminal.line(f"kept from {prepared.clients[0].name}: {name}")


def _pinned(plan: Plan) -> dict[str, list[str]]:
    """Return the axes whose order is fixed, by the reason; kernels and the like have none."""
    found: dict[str, list[str]] = {}
    for name, tensor in plan.tensors.items():
        for axis, layout in enumerate(tensor.axes):
            if isinstance(layout, Pinned) and layout.reason:
                found.setdefault(layout.reason, []).append(f"{name}[{axis}]")
    return found
