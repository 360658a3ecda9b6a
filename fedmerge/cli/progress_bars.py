"""Bars that say how far work is, how fast it goes and how long it still takes."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

BAR_WIDTH = 12  # characters; the rest of the line is for words


class RateColumn(ProgressColumn):
    """How many parts of a step are done in a second, or how many seconds one part takes."""

    def render(self, task: Task) -> Text:
        """Return the rate of a step, or nothing while it is not known."""
        return Text(rate(task.finished_speed or task.speed), no_wrap=True)


def rate(speed: float | None) -> str:
    """Return parts in a second as people read them.

    >>> rate(12.34), rate(0.25), rate(None)
    ('12.3/s', '4.0 s each', '')
    """
    if not speed:
        return ""
    return f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each"


def progress_bars(*, is_one: bool = False) -> Progress:
    """Return bars on stderr that are gone when the work is done; one alone has more words."""
    bar, share = BarColumn(bar_width=BAR_WIDTH), TextColumn("{task.percentage:>3.0f}%")
    if is_one:
        return _on_stderr(_words(), bar, RateColumn())
    return _on_stderr(_words(), bar, share, RateColumn(), TimeRemainingColumn())


def clock() -> Progress:
    """Return a sign of life on stderr, with the time since it began."""
    return _on_stderr(SpinnerColumn(), _words(), TimeElapsedColumn())


def _words() -> TextColumn:
    return TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))


def _on_stderr(*columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=Console(stderr=True), transient=True)
