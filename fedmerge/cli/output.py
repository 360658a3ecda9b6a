"""What is printed: tables, progress, scores, JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

from fedmerge.values.wording import Progress, percent, silent

if TYPE_CHECKING:
    from fedmerge.merging.evaluations import EvaluationOptions
    from fedmerge.training.evaluation import Evaluation


Rows = Sequence[Sequence[str]]

_LIGHT = 2  # characters beside every cell of a table without lines between its columns
_HEAVY = 3
LEAST_TEXT = 8  # characters that text is folded to where it must be


def print_table(title: str, columns: Sequence[str], rows: Rows, *, is_drawn: bool) -> None:
    """Print the columns in which something is; no number is ever broken or cut."""
    filled = [any(row[number] for row in rows) or not rows for number in range(len(columns))]
    columns, *rows = [list(compress(cells, filled)) for cells in (columns, *rows)]
    if is_drawn and _draw(title, columns, rows):
        return
    print(title)
    print("\n".join(_aligned(columns, rows)))


def _draw(title: str, columns: Sequence[str], rows: Rows) -> bool:
    """Draw a table with the lines that there is room for; False if there is none at all."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    numeric = [_is_numeric(rows, number) for number in range(len(columns))]
    heads = [
        _folded(column, [row[number] for row in rows]) if numeric[number] else column
        for number, column in enumerate(columns)
    ]
    style = _style(heads, rows, numeric, console.width)
    if style is None:
        return False
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table(**style)
    for head, is_number in zip(heads, numeric, strict=True):
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(Text(head), justify=justify, overflow="fold", no_wrap=is_number)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    return True


def _style(
    heads: Sequence[str], rows: Rows, numeric: Sequence[bool], room: int
) -> Mapping[str, Any] | None:
    """Return how a table is drawn: the fewer lines, the less room there is."""
    from rich import box

    columns = list(zip(heads, *rows, strict=True))
    needed = [
        _longest_line(cells) if is_number else _longest_word(cells)
        for cells, is_number in zip(columns, numeric, strict=True)
    ]
    if sum(needed) + _HEAVY * len(heads) + 1 <= room:
        return {}
    folded = [
        size if is_number else min(size, LEAST_TEXT)
        for size, is_number in zip(needed, numeric, strict=True)
    ]
    if sum(folded) + _LIGHT * len(heads) > room:
        return None
    light = {"show_edge": False, "pad_edge": False, "collapse_padding": True}
    return {"box": box.SIMPLE_HEAD, **light}


def _folded(head: str, cells: Sequence[str]) -> str:
    """Return a heading in lines as short as its words and the cells below it allow."""
    width = max(_longest_word([head]), *map(len, cells))
    return "\n".join(textwrap.wrap(head, width, break_long_words=False))


def _longest_line(cells: Sequence[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))


def _longest_word(cells: Sequence[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split()), default=0)


def _aligned(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield the rows in columns, text left and numbers right aligned."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    numeric = [_is_numeric(rows, number) for number in range(len(columns))]
    for cells in (columns, *rows):
        placed = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(cells, widths, numeric, strict=True)
        ]
        yield "  ".join(["", *placed]).rstrip()


def _is_numeric(rows: Rows, column: int) -> bool:
    return all(row[column].removeprefix("-")[:1] in "0123456789" for row in rows) and column > 0


SCHEMA = 1  # the version of all that --json prints (docs/reference/schemas)
LONGEST_MESSAGE = 2000  # characters


@dataclass(frozen=True)
class Terminal:
    """How a command talks: as JSON, quietly, or with everything it knows."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    speak: Callable[[str], str] = str  # says options as they are typed

    def note(self, message: str) -> None:
        """Say something on stderr, unless asked to be quiet."""
        if not self.quiet:
            print(plain(bounded(self.speak(message))), file=sys.stderr)

    def warn(self, message: str) -> None:
        """Say on stderr what the user should know about the result."""
        self.note(f"warning: {message}")

    def detail(self, message: str) -> None:
        """Say something on stderr that only -v asks for."""
        if self.verbose:
            self.note(message)

    def problem(self, message: str) -> None:
        """Say on stderr what is wrong, however quiet the command shall be."""
        print(plain(bounded(self.speak(message))), file=sys.stderr)

    def line(self, text: str = "") -> None:
        """Print one line of the result."""
        if not (self.json or self.quiet):
            print(plain(self.speak(text)))

    def result(self, value: dict[str, Any]) -> None:
        """Print the result as one JSON object, if that was asked for."""
        if self.json:
            print(json.dumps({"schema": SCHEMA, **self.spoken(_finite(value))}))

    def spoken(self, value: Any) -> Any:
        """Return JSON values whose texts name options as they are typed."""
        if isinstance(value, dict):
            return {name: self.spoken(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.spoken(inner) for inner in value]
        return self.speak(value) if isinstance(value, str) else value

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
        from fedmerge.cli.progress_bars import progress_bars

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
        from fedmerge.cli.progress_bars import clock

        with clock() as bars:
            bars.add_task(what, total=None)
            yield

    @contextmanager
    def working(self, reading: str, *, one_bar: bool = False) -> Iterator[Working]:
        """Show a clock while inputs are read, then bars; the user's code prints to stderr."""
        with ExitStack() as shown, redirect_stdout(sys.stderr):
            shown.enter_context(self.busy(reading))
            yield Working(self, shown, one_bar)


class Working:
    """What a terminal shows of a command at work: a clock at first, then bars."""

    def __init__(self, terminal: Terminal, shown: ExitStack, one_bar: bool) -> None:
        self._terminal, self._shown, self._one_bar = terminal, shown, one_bar
        self._bars: Progress | None = None

    def prepared(
        self, notes: Iterable[str], warnings: Iterable[str], details: Iterable[str] = ()
    ) -> None:
        """Take the clock away, since inputs are read, and print what is known of them."""
        self._shown.close()
        for detail in details:
            self._terminal.detail(detail)
        for note in notes:
            self._terminal.note(f"note: {note}")
        for warning in warnings:
            self._terminal.warn(warning)

    def progress(self, step: str, done: float, total: int) -> None:
        """Show that `done` of `total` parts of a step are done."""
        if self._bars is None:
            self._shown.close()
            bars = self._terminal.progress(one_bar=self._one_bar)
            self._bars = self._shown.enter_context(bars)
        self._bars(step, done, total)


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
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _can_redraw() -> bool:
    """Return whether stderr is a terminal that can write over a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def evaluation_options(given: Mapping[str, Any]) -> EvaluationOptions:
    """Return what the data mean, from the values of a command line."""
    from fedmerge.merging.evaluations import EvaluationOptions, given_preparation
    from fedmerge.merging.options import choose_device

    asked = {name: given[name] for name in ("task", "batch_size") if given[name] is not None}
    return EvaluationOptions(
        **asked,
        preparation=given_preparation(given["normalize"], given["channels_last"]),
        device=choose_device(given["device"]),
    )


@contextmanager
def evaluating(terminal: Terminal) -> Iterator[Progress]:
    """Give a progress callback, and let the user's code print to stderr only."""
    with redirect_stdout(sys.stderr), terminal.progress() as progress:
        yield progress


def metric_names(found: Iterable[Evaluation | None]) -> list[str]:
    """Return the metrics of evaluations, each once."""
    return list(dict.fromkeys(name for own in found if own is not None for name in own.metrics))


def headings(metrics: Iterable[str]) -> list[str]:
    """Return the columns of an evaluation."""
    return ["loss", *map(metric_title, metrics)]


def metric_title(name: str) -> str:
    """Return a metric's name as people read it.

    >>> metric_title("bits_per_character")
    'bits per character'
    """
    return name.replace("_", " ")


def cells(found: Evaluation | None, metrics: Iterable[str]) -> list[str]:
    """Return an evaluation's loss and metrics, blank where there are none."""
    if found is None:
        return ["", *("" for _ in metrics)]
    shown = (metric(name, found.metrics[name]) if name in found.metrics else "" for name in metrics)
    return [metric("loss", found.loss), *shown]


def metric(name: str, value: float | None) -> str:
    """Return a number as its kind is read, None as what it is.

    >>> metric("accuracy", 0.8712), metric("loss", 0.45678), metric("loss", None)
    ('87.1 %', '0.4568', 'not finite')
    """
    if value is None:
        return "not finite"
    return percent(value) if name == "accuracy" else f"{value:.4f}"
