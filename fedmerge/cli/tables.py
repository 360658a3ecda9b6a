"""Tables: drawn where a person looks, plain columns elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Literal

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
    return all(row[column][:1] in "0123456789" for row in rows) and column > 0
