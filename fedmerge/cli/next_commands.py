"""Commands that are suggested: whole, so that they run as they are printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmerge.cli.command_line import Option
from fedmerge.cli.commands import find_command

TRUSTED = ("allow_global",)  # a record says how its clients are read, but not whom to trust
NEEDED = (  # without these the same clients can't be read, planned or fed
    *("model", "model_arg", "input_shape", "input_dtype", "numbers", "state", "plan", "keep"),
    *("key", "weights", "allow_global", "match_by_order", "dtype", "normalize", "channels_last"),
)


def next_command(
    name: str, arguments: Sequence[str | Path], given: Mapping[str, Any], carried: Sequence[str]
) -> str:
    """Return a command with what it needs of the options that this one was given."""
    command = find_command(name)
    dials = command.dial_options.keys()
    typed = {option.name for option in command.parameters}
    parts = ["fedmerge", name, *map(as_argument, arguments)]
    for option in map(command.find, (own for own in carried if own in typed | dials)):
        parts += _typed(option, given.get(option.name), is_dial=option.name in dials)
    return shlex.join(parts)


def as_argument(path: str | Path) -> str:
    """Return a path that is no option, whatever its name starts with."""
    return f"./{path}" if isinstance(path, Path) and str(path).startswith("-") else str(path)


def _typed(option: Option, value: Any, *, is_dial: bool) -> Iterator[str]:
    """Yield how an option is typed if it was given; a plan as text is a record's, not typed."""
    values = value if option.is_repeatable else [value]
    for own in values or ():
        if own is None or own is False or str(own).startswith("{"):
            continue
        text = "true" if own is True else str(own)
        if is_dial:
            yield from ("--set", f"{option.name}={text}")
        elif option.kind is bool:
            yield option.typed[-1]
        elif text.startswith("-"):
            yield f"{option.typed[-1]}={text}"
        else:
            yield from (option.typed[-1], text)
