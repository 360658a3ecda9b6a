"""Tables inside pages that are otherwise written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def replace_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Put each text between the page's marks `<!-- name -->` and `<!-- /name -->`."""
    content = page.read_text(encoding="utf-8")
    for name, text in blocks.items():
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, begun, rest = content.partition(first)
        _, ended, after = rest.partition(last)
        if not (begun and ended):
            raise ValueError(f"{page} has no block '{name}'")
        # Blank lines: right behind a mark there would be no table.
        content = f"{before}{first}\n{text.strip()}\n\n{last}{after}"
    page.write_text(content, encoding="utf-8")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def told_machine(machine: Mapping[str, str]) -> str:
    """Return in one line on what a page's numbers were measured."""
    return f"Measured on: {', '.join(f'{name} {value}' for name, value in machine.items())}.\n"
