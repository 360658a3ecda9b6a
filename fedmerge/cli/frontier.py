"""`match --frontier`: what other sizes of the merge would give, as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.cli import show
from fedmerge.cli.terminal import Terminal
from fedmerge.types.words import percent
from fedmerge.workflow.reporting.graph import check_picture, draw_sizes

if TYPE_CHECKING:
    from fedmerge.workflow.oneshot.frontier import Frontier, Point


def is_asked_for(given: Mapping[str, Any], inputs: Sequence[Path]) -> bool:
    """Return whether a frontier is wanted; refuse a picture that can't be written."""
    plot: Path | None = given["frontier_plot"]
    if plot is not None:
        check_picture(plot, "--frontier-plot", inputs=inputs, force=given["force"])
    return bool(given["frontier"]) or plot is not None


def show_frontier(found: Frontier, given: Mapping[str, Any], terminal: Terminal) -> None:
    """Print the frontier, and draw it if asked to."""
    rows = [_row(f"client {point.name}", point) for point in found.clients]
    rows += [_row(_label(point), point) for point in found.merges]
    rows.append(_row("ensemble, all side by side", found.ensemble))
    quality = found.merge.quality
    assert quality is not None
    title = f"size against agreement with the ensemble on {quality.samples} held-out probes"
    terminal.table(title, ["model", "growth", "parameters", "agreement", "how"], rows)
    plot: Path | None = given["frontier_plot"]
    if plot is not None:
        draw_sizes(found.to_json(), plot, force=given["force"])
        terminal.line(f"drew {plot}")


def _row(model: str, point: Point) -> list[str]:
    how = "" if point.budget is None else point.name
    size = show.count(point.parameters)
    return [model, f"{point.growth:.2f}", size, percent(point.agreement.decisions), how]


def _label(point: Point) -> str:
    return f"merge within {point.budget:g} ×"
