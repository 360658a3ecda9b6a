"""The help of commands: what most need, or all of it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from fedmerge.cli.command_line import Command, Option
from fedmerge.cli.commands import COMMANDS

_WIDEST = 100  # characters of a line: longer ones are hard to read
_COLUMN, _NARROW = 26, 12  # where explanations begin, of options and of commands
_MOST_EXAMPLES = 2  # where not everything is asked for
_BOLD, _CYAN, _END = "\x1b[1m", "\x1b[36m", "\x1b[0m"
_PROGRAM = (
    ("--version", "Show the version."),
    ("--install-completion", "Let the shell complete commands and options."),
    ("--show-completion", "Print what that would install."),
    ("-h, --help", "Show this. Every command has a --help of its own."),
)


def program_help() -> str:
    """Return the help of the program: its commands."""
    lines = [
        "Usage: fedmerge COMMAND [OPTIONS] [ARGUMENTS]",
        "",
        *_wrapped(
            "Merge separately trained PyTorch checkpoints of one architecture into one model."
        ),
        *_examples(("fedmerge demo", "fedmerge match a.pt b.pt -o global.pt")),
    ]
    for panel in dict.fromkeys(command.panel for command in COMMANDS.values()):
        rows = [
            (command.name, command.help) for command in COMMANDS.values() if command.panel == panel
        ]
        lines += _section(panel, rows, _NARROW)
    return "\n".join([*lines, *_section("Options", _PROGRAM)])


def command_help(command: Command, *, whole: bool) -> str:
    """Return the help of a command, of what most need or of all its options and dials."""
    usual = command.usual if command.usual and not whole else tuple(command.names)
    arguments = [command.known[name] for name in command.arguments]
    lines = [
        *_wrapped(f"Usage: fedmerge {command.name} [OPTIONS] {_placed(arguments)}"),
        "",
        *_wrapped(command.help),
        *_examples(command.examples if whole else command.examples[:_MOST_EXAMPLES]),
        *_section("Arguments", [(_place(own), own.sentence) for own in arguments]),
    ]
    for heading, names in command.options.items():
        shown = [command.known[name] for name in names if name in usual]
        rows = [(_typed(own), _explained(own)) for own in shown]
        if whole:
            dials = [command.known[name] for name in command.dials.get(heading, ())]
            rows += [(f"--set {own.name}={own.values or 'true'}", own.sentence) for own in dials]
        lines += _section(heading, rows)
    hidden = len(command.names - {*usual, *command.arguments})
    if hidden:
        lines += ["", f"{hidden} more: fedmerge {command.name} --help-all"]
    return "\n".join(lines)


def _placed(arguments: Sequence[Option]) -> str:
    return " ".join(_place(own) if own.is_required else f"[{_place(own)}]" for own in arguments)


def _place(own: Option) -> str:
    return f"{own.values}..." if own.is_repeatable else own.values


def _typed(own: Option) -> str:
    return f"{', '.join(own.typed)} {own.values}".rstrip()


def _explained(own: Option) -> str:
    return f"{own.help} (required)." if own.is_required else own.sentence


def _examples(lines: Sequence[str]) -> list[str]:
    return ["", _painted("Examples:", _BOLD), *(f"  {line}" for line in lines)]


def _section(heading: str, rows: Sequence[tuple[str, str]], column: int = _COLUMN) -> list[str]:
    if not rows:
        return []
    inner = [line for left, right in rows for line in _row(left, right, column)]
    return ["", _painted(f"{heading}:", _BOLD), *inner]


def _row(left: str, right: str, column: int) -> Iterator[str]:
    """Yield what is typed and beside it, or below it if there is no room, what it does."""
    explained = textwrap.wrap(right, max(_width() - column, 20))
    margin = " " * column
    is_short = len(left) + 2 < column
    if is_short:
        yield f"  {_painted(left, _CYAN)}".ljust(column + _extra()) + explained.pop(0)
    else:
        yield from (_painted(line, _CYAN) for line in _wrapped_values(left))
    yield from (margin + line for line in explained)


def _wrapped_values(left: str) -> list[str]:
    """Return a long option in lines that break between the words it takes."""
    spaced = left.replace("|", "| ")
    lines = textwrap.wrap(spaced, _width() - 2, initial_indent="  ", subsequent_indent=" " * 6)
    return [line.replace("| ", "|") for line in lines]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _width())


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)


def _extra() -> int:
    """Return how many characters colours take that nobody sees."""
    return len(_CYAN + _END) if _has_colours() else 0


def _painted(text: str, colour: str) -> str:
    return f"{colour}{text}{_END}" if _has_colours() else text


def _has_colours() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    is_drawn = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return is_drawn or "FORCE_COLOR" in os.environ
