"""The picture of a plan as a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedmerge.checkpoint import check_targets, write_bytes
from fedmerge.errors import UsageError
from fedmerge.report import check_drawing, render_plan
from fedmerge.workflow.prepared import Prepared
from fedmerge.workflow.reporting.plans import plan_picture

KINDS = ("svg", "png")


def check_graph(path: Path, *, inputs: Sequence[str | Path], force: bool) -> None:
    """Refuse a picture that can't be drawn or written, before any work."""
    if path.suffix.lower().removeprefix(".") not in KINDS:
        raise UsageError(f"--graph is {path}, expected a name that ends in .svg or .png")
    check_drawing()
    check_targets([path], inputs=inputs, force=force)


def draw_graph(prepared: Prepared, path: Path) -> None:
    """Write the picture of prepared clients' plan, by the name's ending."""
    widths = {
        group.name: [own[group.name] for own in prepared.client_widths]
        for group in prepared.plan.groups
    }
    kind = path.suffix.lower().removeprefix(".")
    write_bytes(path, render_plan(plan_picture(prepared.plan, widths), kind))
