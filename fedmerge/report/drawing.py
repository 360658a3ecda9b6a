"""Shapes of a page's figures, and the words in them."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedmerge.errors import UsageError
from fedmerge.values.wording import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_LISTED = 6


def printable(text: str, most: int | None = None) -> str:
    """Return a name without control characters, its middle left out if it is too long.

    >>> printable("layer1.0.conv1.weight", 12)
    'layer1…eight'
    """
    shown = "".join(c if c.isprintable() else "�" for c in text)
    if most is None or len(shown) <= most:
        return shown
    tail = (most - 1) // 2
    return f"{shown[: most - 1 - tail]}…{shown[len(shown) - tail :]}"


def unbroken(text: str) -> str:
    """Return a sentence in which no line ends between a number and its sign.

    >>> unbroken("95 % of 1.5 × it") == "95\u00a0% of 1.5\u00a0× it"
    True
    """
    return text.replace(" %", "\u00a0%").replace(" ×", "\u00a0×")


def count(number: int) -> str:
    """Return 431080 as 431,080."""
    return f"{number:,}"


def widths(clients: Sequence[int]) -> str:
    """Return the clients' widths: one number if they agree, a range if they are many.

    >>> widths([8, 8]), widths([8, 9]), widths(range(1, 9))
    ('8', '8, 9', '1 to 8')
    """
    if len(set(clients)) == 1:
        return str(clients[0])
    if len(clients) > MOST_LISTED:
        return f"{min(clients)} to {max(clients)}"
    return ", ".join(map(str, clients))


def listed(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """Return names with commas between them, the first `most` of them if they are more.

    >>> listed(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def number(value: float | None, *, is_share: bool = False) -> str:
    """Return a measured number, or that there is none.

    >>> number(0.951, is_share=True), number(0.45678), number(None)
    ('95.1 %', '0.4568', 'not known')
    """
    if value is None:
        return "not known"
    return percent(value) if is_share else f"{value:.4f}"


def owner_ranges(clients: int) -> list[tuple[int, int]]:
    """Return numbers of owners in few ranges, alone and all of them by themselves.

    >>> owner_ranges(4), owner_ranges(16)
    ([(1, 1), (2, 2), (3, 3), (4, 4)], [(1, 1), (2, 3), (4, 7), (8, 15), (16, 16)])
    """
    if clients <= MOST_LISTED:
        return [(owners, owners) for owners in range(1, clients + 1)]
    starts = [1]
    while 2 * starts[-1] < clients:
        starts.append(2 * starts[-1])
    ends = [start - 1 for start in starts[1:]] + [clients - 1]
    return [*zip(starts, ends, strict=True), (clients, clients)]


def owner_label(low: int, high: int) -> str:
    """Return a range of owners in words.

    >>> owner_label(1, 1), owner_label(2, 3)
    ('1 client', '2–3 clients')
    """
    if low == high:
        return f"{low} client" if low == 1 else f"{low} clients"
    return f"{low}–{high} clients"


WIDTH = 5.2  # inches: 374 units of the SVG, so that text is as large as it says on a phone
FONT = 10.5

# Okabe and Ito's colours, told apart by colour-blind readers. The page replaces each by a variable
# that has a lighter value in dark mode; files of their own keep them.
INK, FAINT, GRID, PAPER = "#1c2127", "#5a6472", "#d5dae1", "#ffffff"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#b84a00", "#007f5f", "#a8457e"
SERIES = (BLUE, ORANGE, GREEN, PINK, "#7a5f00", "#3b6e8f", FAINT)
VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES[:-1])},
}

_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_SETTINGS = {
    "font.size": FONT,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # names of files are no formulas
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "lines.linewidth": 2.0,
    "legend.frameon": False,
}


def check_drawing() -> None:
    """Refuse to go on where there is no library to draw with, before any work."""
    try:
        import jinja2 as jinja2  # only whether it is there
        import matplotlib as matplotlib
    except ImportError:
        raise UsageError(
            "reports and pictures of plans need matplotlib and jinja2",
            "pip install 'fedmerge[report]'",
        ) from None


@contextmanager
def settings(name: str) -> Iterator[None]:
    """Draw with our looks; the same values under the same name give the same bytes."""
    import matplotlib as mpl

    given: Any = {**_SETTINGS, "svg.hashsalt": name}
    with mpl.rc_context(given):
        yield


def new_figure(height: float) -> Figure:
    """Return an empty figure of the page's width and so many inches of height."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def one_axes(height: float) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes."""
    figure = new_figure(height)
    return figure, figure.add_subplot()


def as_file(figure: Figure, kind: str) -> bytes:
    """Return a picture as a file of its own, svg or png, on white paper."""
    stream = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(stream, format=kind, metadata=metadata, facecolor=PAPER, dpi=144)
    return stream.getvalue()


def inline(figure: Figure, label: str) -> str:
    """Return a picture as an SVG element for a page, in the page's colours."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(stream.getvalue())
    for unused in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(unused)
    _drop_idle_names(root)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": label}
    return _recoloured(ET.tostring(root, encoding="unicode"))


def _drop_idle_names(root: ET.Element) -> None:
    """Leave no id that nothing refers to: several pictures on a page would share them."""
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
        if _LINK in element.attrib:  # browsers and HTML know the plain name
            element.set("href", element.attrib.pop(_LINK))


def _recoloured(text: str) -> str:
    """Return an SVG whose colours are the page's variables."""
    pattern = re.compile("|".join(map(re.escape, VARIABLES)))
    return pattern.sub(lambda found: VARIABLES[found[0]], text)
