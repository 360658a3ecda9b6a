"""Progress and tables in a notebook."""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from fedmerge.values.wording import Progress, silent

_INTERVAL = 0.2  # seconds between two updates of a bar


def default_progress() -> Progress:
    """Return who hears of progress if nobody is named: a notebook, or nobody."""
    display = _display()
    return silent if display is None else NotebookProgress(display)


class NotebookProgress:
    """A bar in a notebook's cell, which shows the step that goes on."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._shown = ("", 0.0)  # the step, and when it was shown last

    def __call__(self, step: str, done: float, total: int) -> None:
        """Show that `done` of `total` parts of a step are done, not too often."""
        last_step, last_time = self._shown
        now = time.monotonic()
        if step == last_step and done < total and now - last_time < _INTERVAL:
            return
        self._shown = (step, now)
        bar = self._display.HTML(_bar(step, done, total))
        if self._handle is None:
            self._handle = self._display.display(bar, display_id=True)
        else:
            self._handle.update(bar)


def _bar(step: str, done: float, total: int) -> str:
    return f'<progress value="{done:g}" max="{max(total, 1)}"></progress> {html.escape(step)}'


def _display() -> Any:
    """Return IPython's display where a notebook shows what we display, else nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return None
    return importlib.import_module("IPython.display")


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a titled table as a notebook shows it."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    head = f"<p>{html.escape(title)}</p>"
    return f"{head}<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
