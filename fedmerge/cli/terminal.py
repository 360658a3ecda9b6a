"""Where things are printed: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fedmerge.types.progress import Progress, silent


@dataclass(frozen=True)
class Terminal:
    """How a command talks: as JSON, quietly, or with everything it knows."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def note(self, message: str) -> None:
        """Say something on stderr, unless asked to be quiet."""
        if not self.quiet:
            print(message, file=sys.stderr)

    def warn(self, message: str) -> None:
        """Say on stderr what the user should know about the result."""
        self.note(f"warning: {message}")

    def detail(self, message: str) -> None:
        """Say something on stderr that only -v asks for."""
        if self.verbose:
            self.note(message)

    def problem(self, message: str) -> None:
        """Say on stderr what is wrong, however quiet the command shall be."""
        print(message, file=sys.stderr)

    def line(self, text: str = "") -> None:
        """Print one line of the result."""
        if not (self.json or self.quiet):
            print(text)

    def result(self, value: dict[str, Any]) -> None:
        """Print the result as one JSON object, if that was asked for."""
        if self.json:
            print(json.dumps(value))

    @property
    def is_drawn(self) -> bool:
        """Whether tables are drawn, since a person looks."""
        return sys.stdout.isatty()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: drawn on a terminal, plain columns elsewhere."""
        if self.json or self.quiet:
            return
        if self.is_drawn:
            _draw(title, columns, rows)
        else:
            print(title)
            print("\n".join(_aligned(columns, rows)))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Give a progress callback, with a bar where stderr is a terminal."""
        if self.quiet or self.json or not sys.stderr.isatty():
            yield silent
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            tasks: dict[str, Any] = {}

            def show(step: str, done: float, total: int) -> None:
                if step not in tasks:
                    tasks[step] = bar.add_task(step, total=total)
                bar.update(tasks[step], completed=done, total=total)

            yield show


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table()
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if _is_numeric(rows, number) else "left"
        table.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows in columns, text left and numbers right aligned."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    numeric = [_is_numeric(rows, number) for number in range(len(columns))]
    for cells in (columns, *rows):
        placed = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(cells, widths, numeric, strict=True)
        ]
        yield "  ".join(["", *placed]).rstrip()


def _is_numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(row[column][:1] in "0123456789" for row in rows) and column > 0
