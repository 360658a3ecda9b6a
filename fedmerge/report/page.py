"""Values into one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.report import charts, drawing
from fedmerge.report.contents import (
    FrontierPoint,
    GroupView,
    PlanPicture,
    Report,
    RoundsView,
    Score,
    Scores,
)
from fedmerge.report.drawing import as_file, check_drawing, inline, settings
from fedmerge.report.plan_figure import draw_plan, plan_remarks, plan_title
from fedmerge.values.wording import Progress, percent, silent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedmerge.values.arrays import Array


TEMPLATES = Path(__file__).parent / "templates"
SHOWN_MATCHES = 3  # best and worst ones of a group
SHOWN_OWNERS = 4  # of a global unit
SHORT_NAME = 28  # characters of a client where it is named again and again
LOSS = "loss of local training"
ACCURACY = "accuracy"  # comes first, where it is known


@dataclass(frozen=True)
class Chart:
    """A picture as an SVG element, and what is written under it."""

    svg: str
    caption: str


def render(report: Report, *, progress: Progress = silent) -> str:
    """Return the page; the same report gives the same bytes."""
    check_drawing()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,  # names come from files that nobody vouches for
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": drawing.count,
        "percent": percent,
        "printable": drawing.printable,
        "unbroken": drawing.unbroken,
        "widths": drawing.widths,
        "number": drawing.number,
        "listed": drawing.listed,
        "picture": _png,
        "few": _few_matches,
        "table_rows": table_rows,
        "commands": _with_commands,
        "remarks": plan_remarks,
        "plan_title": plan_title,
    }
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        report=report,
        charts=dict(_charts(report)),
        costs={group.name: chart for group, chart in _cost_charts(report, progress)},
        most_of_name=SHORT_NAME,
        most_owners=SHOWN_OWNERS,
        rounds=[] if report.rounds is None else list(_round_charts(report.rounds)),
        style=_raw((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=_raw(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        ranges=[
            (low, high, drawing.owner_label(low, high))
            for low, high in drawing.owner_ranges(report.clients)
        ],
    )


def render_plan(picture: PlanPicture, kind: str) -> bytes:
    """Return the picture of a plan as an svg or png file."""
    check_drawing()
    with _drawing("plan"):
        return as_file(draw_plan(picture, is_alone=True), kind)


def render_frontier(points: Sequence[FrontierPoint], kind: str) -> bytes:
    """Return the picture of sizes and what they give as an svg or png file."""
    check_drawing()
    with _drawing("frontier"):
        return as_file(charts.draw_frontier(points), kind)


def _raw(text: str) -> Any:
    """Return our own text, which is no name from a file, as HTML."""
    from markupsafe import Markup

    return Markup(text)


def _with_commands(text: str) -> Any:
    """Return a sentence as HTML, with what stands between backticks set as code."""
    from markupsafe import Markup, escape

    parts = map(escape, drawing.printable(text).split("`"))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else part
        for number, part in enumerate(parts)
    )


@contextmanager
def _drawing(name: str) -> Iterator[None]:
    """Draw in our looks; a glyph that matplotlib's font lacks is the browser's to show."""
    with settings(name), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _chart(name: str, caption: str, draw: Callable[..., Figure], *values: Any) -> Chart:
    """Draw values under a name that no other picture of the page has."""
    with _drawing(name):
        return Chart(_raw(inline(draw(*values), caption)), caption)


def _charts(report: Report) -> Iterator[tuple[str, Any]]:
    """Yield the pictures that a page has once, and the list of those of scores."""
    yield "plan", _chart("plan", "The groups along the forward path", draw_plan, report.plan)
    yield "scores", list(_score_charts(report))
    if report.groups:
        caption, values = "How many clients own the global units", (report.groups, report.clients)
        yield "sharing", _chart("sharing", caption, charts.draw_sharing, *values)
    if report.frontier:
        caption = "Size against agreement with the ensemble"
        yield "frontier", _chart("frontier", caption, charts.draw_frontier, report.frontier)


def _score_charts(report: Report) -> Iterator[Chart]:
    for number, scores in enumerate(report.scores):
        known = [row for row in scores.rows if row.value is not None]
        left_out = len(known) - len(charts.few_rows(known))
        caption = scores.title
        caption += f" (without {drawing.count(left_out)} clients in the middle)" if left_out else ""
        yield _chart(f"scores-{number}", caption, charts.draw_scores, scores)


def _cost_charts(report: Report, progress: Progress) -> Iterator[tuple[GroupView, Chart]]:
    for number, group in enumerate(report.groups):
        progress("drawing", number, len(report.groups))
        if group.similarities:
            caption = f"Match costs of {drawing.printable(group.name)}{_below(group)}"
            yield group, _chart(f"costs-{number}", caption, charts.draw_costs, group)


def _below(group: GroupView) -> str:
    """Say how many units cost less than the threshold, where there is one."""
    if group.threshold is None:
        return ""
    cheap = sum(cosine > group.threshold for cosine in group.similarities)
    return (
        f": {drawing.count(cheap)} of {drawing.count(len(group.similarities))} below the threshold"
    )


def _round_charts(rounds: RoundsView) -> Iterator[Chart]:
    """Yield every number that is known, by round and by bytes, then the widths."""
    names = dict.fromkeys(m for curve in rounds.curves for m in curve.metrics)
    for metric in (*sorted(names, key=lambda name: name != ACCURACY), None):
        known = [c.losses if metric is None else c.metrics.get(metric, ()) for c in rounds.curves]
        if not any(map(charts.is_drawable, known)):
            continue
        label = LOSS if metric is None else metric.replace("_", " ")
        for by in ("round", "MB exchanged"):
            draw = partial(charts.draw_curves, by_bytes=by != "round", label=label)
            caption = f"{label.capitalize()} by {by}"
            yield _chart(f"{metric}-{by}", caption, draw, rounds.curves, metric)
    if any(width is not None for own in rounds.widths.values() for width in own):
        shown, every = len(charts.shown_widths(rounds)), len(rounds.widths)
        caption = "Global widths over the rounds"
        caption += "" if shown == every else f" (the {shown} of {every} groups that changed most)"
        yield _chart("widths", caption, charts.draw_widths, rounds)


def table_rows(scores: Scores) -> list[Score]:
    """Return the rows of a table: where clients are many, what they are compared with comes first.

    Such a table is scrolled, and nobody should have to look for the merge.
    """
    clients = [row for row in scores.rows if row.kind == "client"]
    if len(clients) <= charts.MOST_BARS:
        return list(scores.rows)
    others = [row for row in scores.rows if row.kind != "client"]
    return [*reversed(others), *clients]


def _few_matches(group: GroupView) -> list[tuple[str, Any]]:
    """Return the best and the worst matches, each once."""
    best = group.matches[:SHOWN_MATCHES]
    worst = group.matches[len(best) :][-SHOWN_MATCHES:]
    return [*(("best", match) for match in best), *(("worst", match) for match in worst)]


def _png(pixels: Array) -> str:
    """Return a picture (height, width[, 3]) in [0, 1] as the address of an inline PNG."""
    import numpy as np
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8)).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
