"""Line plots of accuracies as SVG, with the spread over seeds, for `benchmarks.paper`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 20, 50  # margins; the names stand on the right
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito
STEPS = (1, 2, 5)  # between two numbers on the x axis, times powers of ten
MOST_TICKS = 9
LEVELS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 92, 94, 95, 96, 97, 98, 99)  # % on the y axis
LINE = 18  # pixels between two names, and between two levels at least
ASIDE = 3  # pixels between the spreads of two lines at the same place
BEST = 99.9  # %; above it the logarithm of the error has no room


@dataclass(frozen=True)
class Mark:
    """A mean at one place, and the least and greatest that it is the mean of."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A line of marks in order, or a level: one mark that holds from end to end."""

    name: str
    marks: tuple[Mark, ...]
    is_level: bool = False


@dataclass(frozen=True)
class Axis:
    """Numbers on a stretch of pixels."""

    low: float
    high: float
    first: float  # pixel of the low end
    last: float
    scale: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        """Return the pixel of a number."""
        low, high = self.scale(self.low), self.scale(self.high)
        share = (self.scale(value) - low) / ((high - low) or 1.0)
        return round(self.first + share * (self.last - self.first), 1)


def plot(series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """Return a picture of accuracies in %; the same lines give the same bytes.

    Heights are logarithms of the error, so that good methods can be told apart too.
    """
    marks = [mark for line in series for mark in line.marks]
    x = Axis(0.0, max(mark.x for mark in marks), LEFT, WIDTH - RIGHT)
    low, high = min(mark.low for mark in marks), max(mark.high for mark in marks)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP, _by_error)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(x, y, x_label, y_label),
    ]
    for number, line in enumerate(series):
        colour, aside = COLOURS[number % len(COLOURS)], ASIDE * (number - (len(series) - 1) / 2)
        draw = _level if line.is_level else _line
        parts += draw(line, x, y, colour, aside)
        parts += _name(line, x, colour, TOP + LINE * (number + 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def round_numbers(high: float) -> list[float]:
    """Return numbers from 0 to at most `high` with a step that reads well, not too many."""
    power = 10 ** math.floor(math.log10(high / MOST_TICKS))
    steps = (step * power * scale for scale in (1, 10) for step in STEPS)
    step = next(step for step in steps if high / step < MOST_TICKS)
    return [k * step for k in range(int(high / step) + 1)]


def _by_error(accuracy: float) -> float:
    return -math.log(100 - min(accuracy, BEST))


def _levels(y: Axis) -> list[int]:
    """Return the levels within the axis that have room, from the top."""
    chosen: list[int] = []
    for level in sorted(LEVELS, reverse=True):
        if y.low <= level <= y.high and (not chosen or y(level) - y(chosen[-1]) >= LINE):
            chosen.append(level)
    return chosen


def _axes(x: Axis, y: Axis, x_label: str, y_label: str) -> Iterator[str]:
    for value in round_numbers(x.high):
        yield _text(x(value), y.first + 18, f"{value:g}", "middle")
    for level in _levels(y):
        yield f'<path d="M{x.first} {y(level)}H{x.last}" stroke="#ddd"/>'
        yield _text(x.first - 6, y(level) + 4, str(level), "end")
    yield f'<path d="M{x.first} {y.last}V{y.first}H{x.last}" stroke="black" fill="none"/>'
    yield _text((x.first + x.last) / 2, HEIGHT - 8, x_label, "middle")
    middle = (y.first + y.last) / 2
    yield f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, y_label, "middle")}</g>'


def _line(line: Series, x: Axis, y: Axis, colour: str, aside: float) -> Iterator[str]:
    path = " ".join(f"{x(mark.x)},{y(mark.mean)}" for mark in line.marks)
    yield f'<polyline points="{path}" stroke="{colour}" stroke-width="2" fill="none"/>'
    for mark in line.marks:
        spread = f"M{x(mark.x) + aside} {y(mark.low)}V{y(mark.high)}"
        yield f'<path d="{spread}" stroke="{colour}"/>'
        yield f'<circle cx="{x(mark.x)}" cy="{y(mark.mean)}" r="3" fill="{colour}"/>'


def _level(line: Series, x: Axis, y: Axis, colour: str, aside: float) -> Iterator[str]:
    [mark] = line.marks
    yield f'<path d="M{x.last + aside} {y(mark.low)}V{y(mark.high)}" stroke="{colour}"/>'
    path = f"M{x.first} {y(mark.mean)}H{x.last}"
    yield f'<path d="{path}" stroke="{colour}" stroke-width="2" stroke-dasharray="6 4"/>'


def _name(line: Series, x: Axis, colour: str, height: float) -> Iterator[str]:
    yield f'<circle cx="{x.last + 16}" cy="{height - 4}" r="4" fill="{colour}"/>'
    yield _text(x.last + 26, height, line.name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
