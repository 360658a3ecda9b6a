"""Parameters of commands as values: those that several commands take are written once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

REQUIRED = inspect.Parameter.empty


def option(
    name: str, kind: Any, panel: str, help_text: str, *flags: str, default: Any = None, **more: Any
) -> inspect.Parameter:
    """Return an option under a heading of the help text; a shell completes words of its metavar."""
    described = typer.Option(
        *flags,
        help=help_text,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=_completion(words_in(more.get("metavar", ""))),
        **more,
    )
    return _parameter(name, kind, described, default)


def flag(
    name: str, panel: str, help_text: str, *flags: str, default: bool = False
) -> inspect.Parameter:
    """Return an option that takes no value, and does not look as if it did."""
    named = flags or (f"--{name.replace('_', '-')}",)
    return option(name, bool, panel, help_text, *named, default=default, metavar="")


def argument(
    name: str, kind: Any, help_text: str, *, default: Any = REQUIRED, **more: Any
) -> inspect.Parameter:
    """Return a parameter that is given by its place."""
    settings = {"show_default": False, **more}
    return _parameter(name, kind, typer.Argument(help=help_text, **settings), default)


def signature_of(parameters: Iterable[inspect.Parameter]) -> inspect.Signature:
    """Return the signature of a function that takes these parameters by their names."""
    return inspect.Signature(list(parameters))


def words_in(metavar: str) -> tuple[str, ...]:
    """Return the words that an option takes as they are; those in capitals stand for others.

    >>> words_in("auto|cpu"), words_in("classification|FILE.py:NAME"), words_in("N")
    (('auto', 'cpu'), ('classification',), ())
    """
    return tuple(word for word in metavar.split("|") if re.fullmatch(r"[a-z][a-z0-9-]*", word))


def _parameter(name: str, kind: Any, described: Any, default: Any) -> inspect.Parameter:
    place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, place, default=default, annotation=Annotated[kind, described])


def _completion(words: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Return what a shell asks; None leaves it to offer files."""

    def starting(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return starting if words else None
