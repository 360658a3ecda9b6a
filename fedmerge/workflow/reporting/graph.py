"""The pictures of a plan and of a frontier as files of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmerge.checkpoint import check_targets, write_bytes
from fedmerge.errors import UsageError
from fedmerge.report import check_drawing, render_frontier, render_plan
from fedmerge.workflow.prepared import Prepared
from fedmerge.workflow.reporting.plans import plan_picture
from fedmerge.workflow.reporting.scores import frontier_points

KINDS = ("svg", "png")


def check_picture(path: Path, option: str, *, inputs: Sequence[str | Path], force: bool) -> None:
    """Refuse a picture that can't be drawn or written, before any work."""
    if _kind(path) not in KINDS:
        raise UsageError(f"{option} is {path}, expected a name that ends in .svg or .png")
    check_drawing()
    check_targets([path], inputs=inputs, force=force)


def draw_graph(prepared: Prepared, path: Path, *, force: bool) -> None:
    """Write the picture of prepared clients' plan, by the name's ending."""
    widths = {
        group.name: [own[group.name] for own in prepared.client_widths]
        for group in prepared.plan.groups
    }
    picture = render_plan(plan_picture(prepared.plan, widths), _kind(path))
    write_bytes(path, picture, force=force)


def draw_sizes(frontier: Mapping[str, Any], path: Path, *, force: bool) -> None:
    """Write the picture of a frontier, given as JSON values, by the name's ending."""
    write_bytes(path, render_frontier(frontier_points(frontier), _kind(path)), force=force)


def _kind(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")
