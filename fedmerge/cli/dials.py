"""Dials, which `--set` or a configuration sets, and options that are gone."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from fedmerge.cli.commands import Command
from fedmerge.errors import UsageError

CONFIGURED = "fedmerge.configured"  # in a context's meta: dials of a configuration or a record
SET = "fedmerge.set"  # in a context's meta: the names of the dials that --set names

_BY_FIT = "layers are fitted to what the clients do, which averages never matched"
GONE: Mapping[str, str] = {  # options of earlier versions, and what became of them
    "signature": "units are compared by weights and responses; the choice changed no result",
    "symmetries": "the fit needs no signs or bases that agree",
    "no-symmetries": "the fit needs no signs or bases that agree",
    "correct": _BY_FIT,
    "batch-norm": _BY_FIT,
}


def dials_of(
    command: Command, context: typer.Context, assignments: Sequence[str]
) -> dict[str, Any]:
    """Return the value of every dial: as the command line sets it, else a configuration."""
    known = command.dial_options
    values: dict[str, Any] = {name: dial.unset for name, dial in known.items()}
    values |= context.meta.get(CONFIGURED, {})
    named: dict[str, Any] = {}
    for assignment in assignments:
        name, value = _assignment(command, assignment)
        if known[name].is_repeatable:
            named.setdefault(name, []).append(value)
        else:
            named[name] = value
    context.meta[SET] = frozenset(named)
    return values | named


def _assignment(command: Command, assignment: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE."""
    typed, equals, text = assignment.partition("=")
    name = typed.strip().replace("-", "_")
    if not (name and equals):
        raise UsageError(f"--set is {assignment!r}, expected NAME=VALUE, e.g. gamma=2")
    if name not in command.dial_options:
        raise _unknown(command, name, text)
    return name, command.dial_options[name].read(text)


def _unknown(command: Command, name: str, text: str) -> UsageError:
    if name in command.names:
        return UsageError(
            f"--set {name}: that is an option of its own", f"use {command.spoken(name)} {text}"
        )
    known = sorted(command.dial_options)
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return UsageError(
        f"`fedmerge {command.name} --set` knows no {name!r}",
        f"{meant}there are {', '.join(known)}",
    )


def moved_option(command: Command, typed: str, arguments: Sequence[str]) -> UsageError | None:
    """Return what to say of an option that was there once, None of one that never was."""
    option, _, value = typed.removeprefix("--").partition("=")
    if option in GONE:
        return UsageError(f"there is no --{option} any more: {GONE[option]}", "leave it out")
    name = option.replace("-", "_")
    if name not in command.dial_options:
        return None
    if command.dial_options[name].kind is bool:
        value = "true"
    return UsageError(
        f"--{option} is no option of its own any more",
        f"use --set {name}={value or _value_after(typed, arguments)}",
    )


def _value_after(typed: str, arguments: Sequence[str]) -> str:
    """Return the value that was given with an option, as one word or as two."""
    words = [*arguments, "VALUE"]
    for place, word in enumerate(arguments):
        if word == typed:
            return words[place + 1]
        if word.startswith(f"{typed}="):
            return word.partition("=")[2]
    return "VALUE"
