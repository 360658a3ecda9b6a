"""Line plots as SVG, with the spread over seeds, for `benchmarks.paper`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 20, 50  # margins; the names stand on the right
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito
TICKS = 5
LINE = 18  # between two names


@dataclass(frozen=True)
class Mark:
    """A mean at one place, and the least and greatest that it is the mean of."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A line of marks in order."""

    name: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Axis:
    """Numbers on a stretch of pixels."""

    low: float
    high: float
    first: float  # pixel of the low end
    last: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a number."""
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.first + share * (self.last - self.first), 1)

    @property
    def ticks(self) -> list[float]:
        """Equally spaced numbers from end to end."""
        return [self.low + (self.high - self.low) * k / TICKS for k in range(TICKS + 1)]


def plot(series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """Return a picture of some lines; the same lines give the same bytes."""
    marks = [mark for line in series for mark in line.marks]
    x = Axis(0.0, max(mark.x for mark in marks), LEFT, WIDTH - RIGHT)
    low, high = min(mark.low for mark in marks), max(mark.high for mark in marks)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(x, y, x_label, y_label),
    ]
    for number, line in enumerate(series):
        parts += _line(line, x, y, COLOURS[number % len(COLOURS)], TOP + LINE * (number + 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(x: Axis, y: Axis, x_label: str, y_label: str) -> Iterator[str]:
    for value in x.ticks:
        yield _text(x(value), y.first + 18, f"{value:.3g}", "middle")
    for value in y.ticks:
        yield f'<path d="M{x.first} {y(value)}H{x.last}" stroke="#ddd"/>'
        yield _text(x.first - 6, y(value) + 4, f"{value:.3g}", "end")
    yield f'<path d="M{x.first} {y.last}V{y.first}H{x.last}" stroke="black" fill="none"/>'
    yield _text((x.first + x.last) / 2, HEIGHT - 8, x_label, "middle")
    middle = (y.first + y.last) / 2
    yield f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, y_label, "middle")}</g>'


def _line(line: Series, x: Axis, y: Axis, colour: str, height: float) -> Iterator[str]:
    path = " ".join(f"{x(mark.x)},{y(mark.mean)}" for mark in line.marks)
    yield f'<polyline points="{path}" stroke="{colour}" stroke-width="2" fill="none"/>'
    for mark in line.marks:
        yield f'<path d="M{x(mark.x)} {y(mark.low)}V{y(mark.high)}" stroke="{colour}"/>'
        yield f'<circle cx="{x(mark.x)}" cy="{y(mark.mean)}" r="3" fill="{colour}"/>'
    yield f'<circle cx="{x.last + 16}" cy="{height - 4}" r="4" fill="{colour}"/>'
    yield _text(x.last + 26, height, line.name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
