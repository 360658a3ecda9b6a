"""The charts of a report: scores, sharing, match costs, the frontier, rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedmerge.report import drawing
from fedmerge.report.contents import (
    Curve,
    FrontierPoint,
    GroupView,
    RoundsView,
    Score,
    ScoreKind,
    Scores,
)
from fedmerge.report.drawing import BLUE, FAINT, GREEN, INK, ORANGE, PINK, SERIES, one_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BAR = 0.27  # inches of a row of bars
HEIGHT = 2.7  # inches of other charts
LONGEST_NAME = 26  # characters
LINE_OF_KEY, KEY_SIGN = 64, 6  # characters of a picture's width, and those that a line or box takes
SHARES_END = 1.38  # of an axis of shares: the numbers stand behind the whole
MOST_BARS = 16  # of clients
BINS = 24  # of a distribution
MOST_WIDTHS = 6  # groups whose widths are drawn, those that grew most
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # beside colours: they are told apart in print
LIGHTEST = 0.22  # shade of units of one client; those of all are as dark as can be
COLOURS: Mapping[ScoreKind, str] = {
    "client": FAINT,
    "average": ORANGE,
    "ensemble": GREEN,
    "merge": BLUE,
    "other": PINK,
}


def draw_scores(scores: Scores) -> Figure:
    """Return bars of every model's number, the merge in its own colour."""
    rows = few_rows([row for row in scores.rows if row.value is not None])
    figure, axes = one_axes((0.75 if scores.reference is None else 1.05) + BAR * len(rows))
    names = [drawing.printable(row.model, LONGEST_NAME) for row in rows]
    values = [float(row.value or 0.0) for row in rows]
    bars = axes.barh(
        range(len(rows)), values, color=[COLOURS[row.kind] for row in rows], height=0.68
    )
    labels = [drawing.number(value, is_share=scores.is_share) for value in values]
    if scores.is_share:  # in a column of their own, so that no line crosses them
        for row, label in enumerate(labels):
            axes.text(SHARES_END, row, label, va="center", ha="right", color=INK)
    else:
        axes.bar_label(bars, labels=labels, padding=3, color=INK)
    axes.set_yticks(range(len(rows)), labels=names, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.22, y=0.02)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(scores.metric)
    if scores.is_share:
        axes.set_xlim(0, SHARES_END)
        _percent_ticks(axes, "x")
    if scores.reference is not None:
        axes.axvline(
            scores.reference.value,
            color=COLOURS["ensemble"],
            linestyle="--",
            label=scores.reference.name,
            zorder=0.5,  # behind the bars and their numbers
        )
        _add_key(figure)
    return figure


def few_rows(rows: Sequence[Score]) -> list[Score]:
    """Return rows with a value of which not too many are clients: else their highest and lowest."""
    clients = sorted((row for row in rows if row.kind == "client"), key=lambda row: row.value or 0)
    if len(clients) <= MOST_BARS:
        return list(rows)
    half = MOST_BARS // 2
    left_out = clients[half : len(clients) - half]
    return [row for row in rows if row not in left_out]


def draw_sharing(groups: Sequence[GroupView], clients: int) -> Figure:
    """Return a bar per group: which share of its global units has how many owners."""
    figure, axes = one_axes(1.15 + BAR * len(groups))
    ranges = drawing.owner_ranges(clients)
    starts = [0.0] * len(groups)
    for number, (low, high) in enumerate(ranges):
        shares = [sum(group.owners[low - 1 : high]) / max(1, sum(group.owners)) for group in groups]
        shade = LIGHTEST + (1 - LIGHTEST) * number / max(1, len(ranges) - 1)
        axes.barh(
            range(len(groups)),
            shares,
            left=starts,
            height=0.68,
            color=BLUE,
            alpha=shade,
            label=drawing.owner_label(low, high),
        )
        starts = [a + b for a, b in zip(starts, shares, strict=True)]
    axes.set_yticks(
        range(len(groups)),
        labels=[drawing.printable(group.name, LONGEST_NAME) for group in groups],
        color=INK,
    )
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set_xlim(0, 1)
    axes.grid(visible=False)  # it would shine through the light bars
    _percent_ticks(axes, "x")
    axes.set_xlabel("share of the group's global units")
    _add_key(figure)
    return figure


def draw_costs(group: GroupView) -> Figure:
    """Return the distribution of match costs, 1 − cosine, next to the threshold's."""
    import numpy as np

    figure, axes = one_axes(HEIGHT * 0.8)
    costs = 1 - np.asarray(group.similarities)
    limit = None if group.threshold is None else 1 - group.threshold
    highest = max(float(costs.max()), limit or 0.0) * 1.05
    counts, edges = np.histogram(costs, bins=BINS, range=(0.0, max(highest, 1e-3)))
    axes.stairs(counts, edges, fill=True, color=BLUE)
    if limit is not None:
        label = f"threshold {limit:.3g} (cosine {group.threshold:g})"
        axes.axvline(limit, color=ORANGE, linestyle="--", label=label)
        _add_key(figure)  # over the axes: inside it would lie on the line
    axes.set_xlabel("match cost, 1 − cosine (0: equal units)")
    axes.set_ylabel("units")
    _whole_ticks(axes, "y")
    return figure


def draw_frontier(points: Sequence[FrontierPoint]) -> Figure:
    """Return agreement with the ensemble against size."""
    figure, axes = one_axes(HEIGHT * 1.15)
    kinds = (("client", ORANGE, "^", "clients"), ("merge", BLUE, "o", "merges"))
    for kind, colour, marker, label in (*kinds, ("ensemble", GREEN, "s", "ensemble")):
        own = sorted((p.growth, p.agreement) for p in points if p.kind == kind)
        line = "-" if kind == "merge" else "None"
        axes.plot(*zip(*own, strict=True), linestyle=line, marker=marker, color=colour, label=label)
    own = [(p.growth, p.agreement) for p in points if p.is_own]
    if own:
        axes.plot(
            *own[0],
            linestyle="None",
            marker="o",
            markersize=13,
            markerfacecolor="none",
            color=BLUE,
            label="this file",
        )
    axes.set_xlabel("size, as a multiple of a net as wide as the widest client")
    axes.set_ylabel("decides as the ensemble")
    axes.set_xlim(left=0)
    _percent_ticks(axes, "y")
    _add_key(figure)
    return figure


def draw_curves(
    curves: Sequence[Curve], metric: str | None, *, by_bytes: bool, label: str
) -> Figure:
    """Return a number by round, or by what was exchanged; `metric` None is the local loss."""
    figure, axes = one_axes(HEIGHT)
    for number, curve in enumerate(curves):
        values = curve.losses if metric is None else curve.metrics.get(metric, ())
        places = curve.megabytes if by_bytes else curve.rounds
        known = [(x, y) for x, y in zip(places, values, strict=False) if y is not None]
        if not known:
            continue
        axes.plot(
            *zip(*known, strict=True),
            color=SERIES[number % len(SERIES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linestyle="-" if curve.is_own else "--",
            label=drawing.printable(curve.name, LONGEST_NAME),
        )
    axes.set_xlabel("MB exchanged, up and down" if by_bytes else "round")
    axes.set_ylabel(label)
    if metric == "accuracy":
        _percent_ticks(axes, "y")
    if not by_bytes:
        _round_ticks(axes, curves)
    _add_key(figure)
    return figure


def draw_widths(rounds: RoundsView) -> Figure:
    """Return the groups' global widths over the rounds."""
    figure, axes = one_axes(HEIGHT)
    for number, name in enumerate(shown_widths(rounds)):
        known = [
            (place, width)
            for place, width in zip(rounds.curves[0].rounds, rounds.widths[name], strict=True)
            if width is not None
        ]
        axes.plot(
            *zip(*known, strict=True),
            color=SERIES[number % len(SERIES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            label=drawing.printable(name, LONGEST_NAME),
        )
    axes.set_xlabel("round")
    axes.set_ylabel("units")
    axes.set_ylim(bottom=0)
    _round_ticks(axes, rounds.curves[:1])
    _add_key(figure)
    return figure


def shown_widths(rounds: RoundsView) -> list[str]:
    """Return the groups whose widths changed most, in the plan's order."""

    def change(name: str) -> int:
        known = [width for width in rounds.widths[name] if width is not None]
        return max(known, default=0) - min(known, default=0)

    most = sorted(rounds.widths, key=change, reverse=True)[:MOST_WIDTHS]
    return [name for name in rounds.widths if name in most]


def _add_key(figure: Figure) -> None:
    """Say over the axes which colour and marker is what, line by line from the left."""
    drawn, names = figure.axes[0].get_legend_handles_labels()
    columns = key_columns(names)
    order = sorted(range(len(names)), key=lambda number: number % columns)  # it fills columns first
    figure.legend(
        [drawn[number] for number in order],
        [names[number] for number in order],
        loc="outside upper left",
        ncols=columns,
        handlelength=1.6,
        columnspacing=1.2,
    )


def key_columns(names: Sequence[str]) -> int:
    """Return how many names stand beside each other in a picture's width.

    >>> key_columns(["1 client", "2 clients", "3 clients", "4 clients"])
    4
    >>> key_columns(["a name of half of a line", "fedma", "fedavg"])
    2
    """
    longest = max(map(len, names), default=1)
    return max(1, min(len(names), LINE_OF_KEY // (longest + KEY_SIGN)))


def _percent_ticks(axes: Axes, which: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    if which == "x":
        axis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1.0]))


def _round_ticks(axes: Axes, curves: Sequence[Curve]) -> None:
    """Let an axis span all rounds, also those of which a number is not known."""
    last = max((curve.rounds[-1] for curve in curves if curve.rounds), default=1)
    axes.set_xlim(0.5, last + 0.5)
    _whole_ticks(axes, "x")


def _whole_ticks(axes: Axes, which: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def is_drawable(values: Sequence[float | None]) -> bool:
    """Return whether there is a finite number among the values."""
    return any(value is not None and math.isfinite(value) for value in values)
