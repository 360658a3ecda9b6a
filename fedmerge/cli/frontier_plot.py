"""The frontier of sizes as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 130, 20, 50  # margins; names stand on the right
CLIENT, MERGE, ENSEMBLE = "#d55e00", "#0072b2", "#009e73"  # Okabe and Ito
LEVELS = 5  # steps of the axis of agreement
LINE = 18  # pixels between two names
Place = tuple[float, float]  # growth, and agreement from 0 to 1


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


def draw(clients: Sequence[Place], merges: Sequence[Place], ensemble: Place) -> str:
    """Return a picture of agreement against growth; the same places give the same bytes."""
    every = [*clients, *merges, ensemble]
    low = math.floor(10 * min(agreed for _, agreed in every)) / 10
    x = Axis(0.0, max(growth for growth, _ in every), LEFT, WIDTH - RIGHT)
    y = Axis(min(low, 0.9), 1.0, HEIGHT - BOTTOM, TOP)
    line = " ".join(f"{x(growth)},{y(agreed)}" for growth, agreed in merges)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(x, y),
        f'<polyline points="{line}" stroke="{MERGE}" stroke-width="2" fill="none"/>',
    ]
    named = {"clients": (CLIENT, clients), "merges": (MERGE, merges)}
    named["ensemble"] = (ENSEMBLE, [ensemble])
    for number, (name, (colour, places)) in enumerate(named.items()):
        parts += [_dot(x(growth), y(agreed), colour) for growth, agreed in places]
        height = TOP + LINE * (number + 1)
        parts += [_dot(x.last + 16, height - 4, colour)]
        parts += [_text(x.last + 26, height, name, "start")]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(x: Axis, y: Axis) -> Iterator[str]:
    step = max(1, math.ceil(x.high / 8))
    for growth in range(0, math.floor(x.high) + 1, step):
        yield _text(x(growth), y.first + 18, f"{growth} ×", "middle")
    for number in range(LEVELS + 1):
        level = y.low + (y.high - y.low) * number / LEVELS
        yield f'<path d="M{x.first} {y(level)}H{x.last}" stroke="#ddd"/>'
        yield _text(x.first - 6, y(level) + 4, f"{100 * level:.0f}", "end")
    yield f'<path d="M{x.first} {y.last}V{y.first}H{x.last}" stroke="black" fill="none"/>'
    size = "parameters, as multiples of a net as wide as the widest client"
    yield _text((x.first + x.last) / 2, HEIGHT - 8, size, "middle")
    middle = (y.first + y.last) / 2
    label = _text(14, middle, "decides as the ensemble does, %", "middle")
    yield f'<g transform="rotate(-90 14 {middle})">{label}</g>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
