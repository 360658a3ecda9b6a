"""Matplotlib pictures as SVG that follows the page's colours, and as files of their own."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedmerge.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
