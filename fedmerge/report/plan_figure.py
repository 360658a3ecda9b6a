"""The picture of a plan: groups down the forward path, their widths before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fedmerge.report import drawing
from fedmerge.report.contents import Edge, PlanPicture, Stage
from fedmerge.report.drawing import BLUE, FAINT, GRID, INK, ORANGE, PAPER, WIDTH, new_figure
from fedmerge.values.plans import Plan, TensorPlan

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


POINTS = 72  # units of the picture to an inch
ROW, TOP = 38.0, 30.0
PATH = 52.0  # where the forward path runs; shortcuts and returns are drawn left of it
BARS = 66.0
RIGHT = WIDTH * POINTS - 6
NUMBERS = 104.0  # room for the widths in figures, at the right
BAR = 5.0
LONGEST_NAME = 44  # characters
LINE, MARGIN, SMALL = 18.0, 8.0, 9.0  # of the words around a picture that stands alone
LONGEST_LINE = 46


@dataclass(frozen=True)
class Lane:
    """An edge that leaves the path, and how far from it, counted from 0."""

    edge: Edge
    number: int


def draw_plan(picture: PlanPicture, *, is_alone: bool = False) -> Figure:
    """Return a picture of the groups from the input down to the output.

    One that stands alone has its title over it, and what its signs mean under it.
    """
    title = [plan_title(picture)] * is_alone
    remarks = plan_remarks(picture) if is_alone else []
    below = TOP + ROW * (len(picture.stages) + 2)
    top, height = -LINE * len(title), below + LINE * len(remarks)
    figure = new_figure((height - top) / POINTS)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH * POINTS)
    axes.set_ylim(height, top)
    for line in title:
        axes.text(BARS, top + LINE, drawing.printable(line, LONGEST_LINE), color=INK, weight="bold")
    for number, line in enumerate(remarks):
        axes.text(MARGIN, below + LINE * (number + 0.5), line, color=FAINT, size=SMALL)
    _draw_key(axes, picture)
    _draw_edges(axes, picture)
    _draw_end(axes, -1, "input")
    _draw_end(axes, len(picture.stages), "output")
    most = max((max(_widths(stage)) for stage in picture.stages), default=1)
    for row, stage in enumerate(picture.stages):
        _draw_stage(axes, row, stage, most)
    return figure


def plan_title(picture: PlanPicture) -> str:
    """Return whose plan it is, and how many groups it has."""
    count = len(picture.stages)
    return f"{picture.title}: {count} {'group' if count == 1 else 'groups'} of hidden units"


def plan_remarks(picture: PlanPicture) -> list[str]:
    """Return a sentence for every sign of the picture that does not explain itself."""
    signs = {
        "A diamond can't grow.": any(stage.why_fixed for stage in picture.stages),
        "A loop leads back into its own group (recurrence).": any(
            edge.end == edge.start for edge in picture.edges
        ),
        "Dashed lines lead back into an earlier group (skip connections).": any(
            edge.end < edge.start for edge in picture.edges
        ),
    }
    return [sentence for sentence, is_there in signs.items() if is_there]


def _widths(stage: Stage) -> tuple[int, ...]:
    return stage.client_widths if stage.width is None else (*stage.client_widths, stage.width)


def _middle(row: int) -> float:
    """Return the height of a row; -1 is the input's."""
    return TOP + ROW * (row + 1.5)


def _draw_key(axes: Axes, picture: PlanPicture) -> None:
    is_merged = any(stage.width is not None for stage in picture.stages)
    is_one = all(len(set(stage.client_widths)) == 1 for stage in picture.stages)
    clients = "clients" if is_one else "clients, narrowest to widest"
    entries = [(clients, FAINT)] + [("merged", BLUE)] * is_merged
    for (text, colour), x in zip(entries, (BARS, BARS + (90 if is_one else 210)), strict=False):
        axes.plot([x, x + 16], [14, 14], color=colour, linewidth=6, solid_capstyle="butt")
        axes.text(x + 22, 14, text, va="center", color=FAINT)


def _draw_end(axes: Axes, row: int, text: str) -> None:
    axes.plot([PATH], [_middle(row)], marker="s", markersize=6, color=FAINT)
    axes.text(BARS, _middle(row), text, va="center", color=FAINT)


def _draw_stage(axes: Axes, row: int, stage: Stage, most: int) -> None:
    """Draw a group's name over two bars: the clients' widths, and the global one."""
    y, scale = _middle(row), (RIGHT - NUMBERS - BARS) / most
    marker = "o" if not stage.why_fixed else "D"  # a diamond can't grow
    axes.plot([PATH], [y], marker=marker, markersize=7, color=PAPER, markeredgecolor=INK, zorder=3)
    name = drawing.printable(stage.name, LONGEST_NAME)
    axes.text(BARS, y - 8, name, va="center", color=INK)
    low, high = min(stage.client_widths), max(stage.client_widths)
    _bar(axes, y + 4, BARS, low * scale, FAINT)
    _bar(axes, y + 4, BARS + low * scale, (high - low) * scale, GRID)
    text = drawing.widths(stage.client_widths)
    if stage.width is not None:
        _bar(axes, y + 11, BARS, stage.width * scale, BLUE)
        text += f" → {stage.width}"
    axes.text(RIGHT, y + 7, drawing.printable(text, 17), va="center", ha="right", color=INK)


def _bar(axes: Axes, y: float, left: float, length: float, colour: str) -> None:
    axes.barh([y], [length], left=left, height=BAR, color=colour)


def _draw_edges(axes: Axes, picture: PlanPicture) -> None:
    straight = [edge for edge in picture.edges if edge.end == edge.start + 1]
    for edge in straight:
        _arrow(axes, (PATH, _middle(edge.start) + 6), (PATH, _middle(edge.end) - 6), INK, "arc3")
    loops = [edge for edge in picture.edges if edge.end == edge.start]
    for edge in loops:  # recurrent: a layer that feeds itself
        y = _middle(edge.start)
        _arrow(axes, (PATH - 4, y + 5), (PATH - 4, y - 5), ORANGE, "arc3,rad=-1.6")
    others = [edge for edge in picture.edges if edge not in straight and edge not in loops]
    lanes = assign_lanes(others)
    step = (PATH - 14) / max(1, *(lane.number + 1 for lane in lanes), 4) if lanes else 0.0
    for lane in lanes:
        _draw_lane(axes, lane, PATH - 8 - step * (lane.number + 0.5))


def _draw_lane(axes: Axes, lane: Lane, x: float) -> None:
    """Draw an edge beside the path: shortcuts forward plain, returns dashed."""
    is_back = lane.edge.end < lane.edge.start
    out, into = (-1, 1) if is_back else (4, -4)  # above each other, so that all four are told apart
    start, end = _middle(lane.edge.start) + out, _middle(lane.edge.end) + into
    style, colour = ("--", ORANGE) if is_back else ("-", FAINT)
    xs, ys = [PATH - 5, x, x, PATH - 11], [start, start, end, end]
    axes.plot(xs, ys, linestyle=style, color=colour, linewidth=1.1)
    _arrow(axes, (PATH - 12, end), (PATH - 4, end), colour, "arc3")


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, style: str
) -> None:
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>,head_length=0.35,head_width=0.18",
            "color": colour,
            "linewidth": 1.1,
            "connectionstyle": style,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def assign_lanes(edges: Sequence[Edge]) -> list[Lane]:
    """Return each edge's lane: short ones nearest to the path, none across another in its lane."""
    lanes: list[list[tuple[int, int]]] = []
    found = []
    for edge in sorted(edges, key=lambda e: (abs(e.end - e.start), min(e.start, e.end), e.start)):
        low, high = sorted((edge.start, edge.end))
        free = (k for k, taken in enumerate(lanes) if all(high < a or b < low for a, b in taken))
        number = next(free, len(lanes))
        if number == len(lanes):
            lanes.append([])
        lanes[number].append((low, high))
        found.append(Lane(edge, number))
    return found


INPUT = -1


CONVOLUTION = 4  # axes of a weight: units, inputs, height, width


_Ways: TypeAlias = dict[tuple[int, int], list[str]]  # from row to row, by which tensors


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


def has_convolution(plan: Plan) -> bool:
    """Return whether a convolution makes matched units, so that images can be seen by them."""
    return any(is_convolution(tensor) for tensor in plan.tensors.values())


def is_convolution(tensor: TensorPlan) -> bool:
    """Return whether a tensor is a convolution's weight that makes the units of a group alone."""
    is_weight = tensor.role == "weight" and len(tensor.axes) == CONVOLUTION and tensor.out == 0
    return is_weight and len(tensor.produces) == 1


def _edges(plan: Plan) -> Iterator[Edge]:
    """Yield what leads from group to group, each way once with all its tensors."""
    rows = {group.name: row for row, group in enumerate(plan.groups)}
    found: _Ways = {}
    for name, tensor in plan.tensors.items():
        if len(tensor.axes) < 2 or tensor.role == "pointwise":
            continue  # biases and norms stay within a group
        starts = [rows[group] for group in sorted(tensor.consumes)] or [INPUT]
        for start in starts:
            for end in _ends(tensor, rows):
                found.setdefault((start, end), []).append(name)
    if not any(end == len(rows) for _, end in found):
        found |= _tied_outputs(found, len(rows))
    for (start, end), tensors in found.items():
        yield Edge(start, end, tuple(tensors))


def _tied_outputs(found: _Ways, output: int) -> _Ways:
    """Return the ways to the output where no tensor of its own makes it.

    Then one that reads the input does, from the group that it makes: a tied embedding.
    """
    return {(end, output): tensors for (start, end), tensors in found.items() if start == INPUT}


def _ends(tensor: TensorPlan, rows: Mapping[str, int]) -> list[int]:
    if tensor.makes_outputs:
        return [len(rows)]
    return [rows[group] for group in sorted(tensor.produces)]
