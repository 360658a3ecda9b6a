"""Where things are printed: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedmerge.cli.tables import print_table
from fedmerge.types.progress import Progress, silent

SCHEMA = 1  # the version of all that --json prints (docs/reference/schemas)
LONGEST_MESSAGE = 2000  # characters


@dataclass(frozen=True)
class Terminal:
    """How a command talks: as JSON, quietly, or with everything it knows."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def note(self, message: str) -> None:
        """Say something on stderr, unless asked to be quiet."""
        if not self.quiet:
            print(plain(bounded(message)), file=sys.stderr)

    def warn(self, message: str) -> None:
        """Say on stderr what the user should know about the result."""
        self.note(f"warning: {message}")

    def detail(self, message: str) -> None:
        """Say something on stderr that only -v asks for."""
        if self.verbose:
            self.note(message)

    def problem(self, message: str) -> None:
        """Say on stderr what is wrong, however quiet the command shall be."""
        print(plain(bounded(message)), file=sys.stderr)

    def line(self, text: str = "") -> None:
        """Print one line of the result."""
        if not (self.json or self.quiet):
            print(plain(text))

    def result(self, value: dict[str, Any]) -> None:
        """Print the result as one JSON object, if that was asked for."""
        if self.json:
            print(json.dumps({"schema": SCHEMA, **_finite(value)}))

    @property
    def is_drawn(self) -> bool:
        """Whether tables are drawn, since a person looks."""
        return sys.stdout.isatty()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: drawn on a terminal, plain columns elsewhere."""
        if self.json or self.quiet:
            return
        cells = [[plain(cell) for cell in row] for row in rows]
        print_table(plain(title), columns, cells, is_drawn=self.is_drawn)

    @contextmanager
    def progress(self, *, one_bar: bool = False) -> Iterator[Progress]:
        """Give a progress callback, with a bar per step where stderr is a terminal.

        With `one_bar`, steps are what the only bar says at a time, also of the time left.
        """
        if self.quiet or self.json or not _can_redraw():
            yield silent
            return
        from fedmerge.cli.bars import progress_bars

        with progress_bars(is_one=one_bar) as bars:
            tasks: dict[str, Any] = {}

            def show(step: str, done: float, total: int) -> None:
                key = "" if one_bar else step
                if key not in tasks:
                    tasks[key] = bars.add_task(step, total=total)
                bars.update(tasks[key], description=step, completed=done, total=total)

            yield show

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say on a terminal what goes on, and for how long, where nobody knows how far it is."""
        if self.quiet or self.json or not _can_redraw():
            yield
            return
        from fedmerge.cli.bars import clock

        with clock() as bars:
            bars.add_task(what, total=None)
            yield


def _finite(value: Any) -> Any:
    """Return JSON values with null in place of numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def bounded(text: str) -> str:
    """Return a message without its middle if it is very long: names in files may be of any length.

    >>> len(bounded("n" * 5_000_000)), bounded("short")
    (2000, 'short')
    """
    if len(text) <= LONGEST_MESSAGE:
        return text
    kept = LONGEST_MESSAGE // 2
    return f"{text[: kept - 1]}…{text[-kept:]}"


def plain(text: str) -> str:
    """Return a text with control characters escaped, but for line ends: names may hold any.

    >>> print(plain("ring" + chr(7)))
    ring\\x07
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _can_redraw() -> bool:
    """Return whether stderr is a terminal that can write over a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
