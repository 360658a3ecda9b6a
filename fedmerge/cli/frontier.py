"""`match --frontier`: what other sizes of the merge would give, as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.checkpoint import check_targets, write_text
from fedmerge.cli import show
from fedmerge.cli.frontier_plot import Place, draw
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError

if TYPE_CHECKING:
    from fedmerge.workflow.oneshot.frontier import Frontier, Point

PLOT_SUFFIX = ".svg"


def is_asked_for(given: Mapping[str, Any], inputs: Sequence[Path]) -> bool:
    """Return whether a frontier is wanted; refuse a picture that can't be written."""
    plot: Path | None = given["frontier_plot"]
    if plot is not None:
        if plot.suffix.lower() != PLOT_SUFFIX:
            raise UsageError(f"--frontier-plot is {plot}, expected a name that ends in .svg")
        check_targets([plot], inputs=inputs, force=given["force"])
    return bool(given["frontier"]) or plot is not None


def show_frontier(found: Frontier, plot: Path | None, terminal: Terminal) -> None:
    """Print the frontier, and draw it if asked to."""
    rows = [_row(f"client {point.name}", point) for point in found.clients]
    rows += [_row(_label(point), point) for point in found.merges]
    rows.append(_row("ensemble, all side by side", found.ensemble))
    quality = found.merge.quality
    assert quality is not None
    title = f"size against agreement with the ensemble on {quality.samples} held-out probes"
    terminal.table(title, ["model", "growth", "parameters", "agreement", "how"], rows)
    if plot is not None:
        each = (map(_place, points) for points in (found.clients, found.merges))
        clients, merges = map(list, each)
        write_text(plot, draw(clients, merges, _place(found.ensemble)))
        terminal.line(f"drew {plot}")


def _row(model: str, point: Point) -> list[str]:
    how = "" if point.budget is None else point.name
    size = show.count(point.parameters)
    return [model, f"{point.growth:.2f}", size, f"{100 * point.agreement.decisions:.1f} %", how]


def _label(point: Point) -> str:
    return f"merge within {point.budget:g} ×"


def _place(point: Point) -> Place:
    return point.growth, point.agreement.decisions
