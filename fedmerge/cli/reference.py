"""Tables of options for the reference, made from the commands: `python -m fedmerge.cli.reference`.

The page has a block between `<!-- options: NAME -->` and `<!-- end -->` for every command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fedmerge.cli.command_line import Command, Option
from fedmerge.cli.commands import COMMANDS

_BLOCK = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", re.S)
_HEAD = ("| option | value | meaning | default |", "|---|---|---|---|")


def rewritten(page: str) -> str:
    """Return the page with the tables that the commands give."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", page)


def table(name: str) -> str:
    """Return the options of a command as a table."""
    return "\n".join((*_HEAD, *_rows(COMMANDS[name])))


def _rows(command: Command) -> Iterator[str]:
    for heading, names in command.options.items():
        yield f"| **{heading}** | | | |"
        for name in names:
            own = command.known[name]
            yield _row(", ".join(f"`{way}`" for way in own.typed), own)
        for name in command.dials.get(heading, ()):
            yield _row(f"`--set {name}=…`", command.known[name])


def _row(typed: str, own: Option) -> str:
    values = f"`{own.values}`" if own.values else ""
    default = "required" if own.is_required else own.default
    return "| " + " | ".join(map(_cell, (typed, values, own.help, default))) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(path: Path) -> None:
    """Bring the tables of a page up to date."""
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
