"""The commands and options that there are, and whether a command line names only those."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache

import typer

from fedmerge.cli import app

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?<!-)")
_NAMED = re.compile(r"`fedmerge ([a-z]+)((?: [^`]*)?)`")


@cache
def options_of_commands() -> Mapping[str, set[str]]:
    """Return every command's options; the program's own have no command's name."""
    root = typer.main.get_command(app)
    commands = {"": root, **getattr(root, "commands", {})}
    return {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for name, command in commands.items()
    }


def unknown_in(text: str) -> list[str]:
    """Return the options and commands that a text names and that do not exist."""
    known = options_of_commands()
    anywhere = set().union(*known.values())
    wrong = [option for option in _OPTION.findall(text) if option not in anywhere]
    for command, rest in _NAMED.findall(text):
        if command not in known:
            wrong.append(f"fedmerge {command}")
        else:
            found = _OPTION.findall(rest)
            wrong += [f"{command} {option}" for option in found if option not in known[command]]
    return wrong


def unknown_in_line(line: str) -> list[str]:
    """Return what a command line gives that its command does not take."""
    return list(_unknown(shlex.split(line, comments=True)))


def _unknown(words: list[str]) -> Iterator[str]:
    known = options_of_commands()
    for place, word in enumerate(words):
        if word != "fedmerge":
            continue
        command, *rest = [*words[place + 1 :], ""]
        if command.startswith("-") or not command:
            command, rest = "", [command]
        if command not in known:
            yield f"fedmerge {command}"
            continue
        options = [word for word in rest if re.fullmatch(r"-[a-z]|--[a-z-]+", word)]
        yield from (f"{command} {option}" for option in options if option not in known[command])
