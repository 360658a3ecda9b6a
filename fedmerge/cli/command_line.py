"""What is typed: options, the commands that take them, and dials, which `--set` sets."""

from __future__ import annotations

import difflib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

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
_QUOTED = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")  # an option in a message
_EXPECTED: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}
_TRUTHS = {"true": True, "false": False}
CHECKED = ("base", "allow_global")  # a record says how to read clients, not whom to trust
NEEDED = (  # without these the same clients can't be read, planned or fed
    *("model", "model_arg", "input_shape", "input_dtype", "numbers", "state", "plan", "keep"),
    *("key", "weights", "allow_global", "match_by_order", "dtype", "normalize", "channels_last"),
)


@dataclass(frozen=True)
class Option:
    """What a command may be given, by name or by its place."""

    name: str  # of the value that a command gets
    help: str  # one sentence without its full stop
    values: str = ""  # words it takes, or in capitals what stands for them; "" for a switch
    default: str = ""  # in words
    kind: Any = str  # or bool, int, float, Path, list[str], list[Path]
    flags: tuple[str, ...] = ()  # as typed, where that is not --name
    start: Any = None  # the value of an option that is not given
    is_required: bool = False
    is_argument: bool = False

    @property
    def typed(self) -> tuple[str, ...]:
        """How the option is typed; the last way is the whole name."""
        return self.flags or ("--" + self.name.replace("_", "-"),)

    @property
    def sentence(self) -> str:
        """What the option does, and its default."""
        return f"{self.help} (default: {self.default})." if self.default else f"{self.help}."

    @property
    def is_repeatable(self) -> bool:
        """Whether the option collects values."""
        return self.kind in (list[str], list[Path])

    @property
    def unset(self) -> Any:
        """The value of an option that nobody gives."""
        return False if self.kind is bool else self.start

    def read(self, text: str) -> Any:
        """Return a value of the option from what was typed; raise `UsageError` if it is none."""
        try:
            if self.kind is bool:
                return _TRUTHS[text.lower()]
            return text if self.is_repeatable else self.kind(text)
        except (KeyError, ValueError):
            expected = _EXPECTED[self.kind]
            raise UsageError(f"`{self.name}` is {text!r}, expected {expected}") from None

    def words(self, value: Any, *, is_dial: bool) -> Iterator[str]:
        """Yield how a value is typed if it was given; a plan as text is a record's, not typed."""
        for own in (value if self.is_repeatable else [value]) or ():
            if own is None or own is False or str(own).startswith("{"):
                continue
            text = "true" if own is True else str(own)
            if is_dial:
                yield from ("--set", f"{self.name}={text}")
            elif self.kind is bool:
                yield self.typed[-1]
            elif text.startswith("-"):
                yield f"{self.typed[-1]}={text}"
            else:
                yield from (self.typed[-1], text)


@dataclass(frozen=True)
class Command:
    """A command, which `run` of the module of its name carries out."""

    name: str
    panel: str  # its heading among the commands
    help: str
    examples: tuple[str, ...]
    arguments: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # by the headings of the help
    dials: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # under --set
    usual: tuple[str, ...] = ()  # what --help shows; all if there are none
    known: Mapping[str, Option] = field(default_factory=dict)  # by name, also those of others

    @property
    def parameters(self) -> tuple[Option, ...]:
        """All that is typed as an argument or an option of its own."""
        names = (*self.arguments, *(name for names in self.options.values() for name in names))
        return tuple(self.known[name] for name in names)

    @property
    def dial_options(self) -> Mapping[str, Option]:
        """What --set sets, by name."""
        names = (name for names in self.dials.values() for name in names)
        return {name: self.known[name] for name in names}

    @property
    def names(self) -> frozenset[str]:
        """The names of all values that the command gets."""
        by_heading = (*self.options.values(), *self.dials.values())
        return frozenset((*self.arguments, *(name for names in by_heading for name in names)))

    def spoken(self, name: str, value: str | None = None) -> str:
        """Return how an option is typed, of this command or of another one."""
        if name in self.dial_options:
            if value is None and self.dial_options[name].kind is bool:
                value = "true"
            return f"--set {name}" if value is None else f"--set {name}={value}"
        options = [option for option in self.parameters if option.name == name]
        typed = options[0].typed[-1] if options else "--" + name.replace("_", "-")
        return typed if value is None else f"{typed} {value}"

    def speak(self, text: str) -> str:
        """Return a message of the library with the options that it names as they are typed."""

        def spoken(found: re.Match[str]) -> str:
            return self.spoken(found[1], found[2]) if found[1] in self.known else found[0]

        return _QUOTED.sub(spoken, text)

    def suggested(
        self,
        arguments: Sequence[str | Path],
        given: Mapping[str, Any],
        carried: Sequence[str] = (),
    ) -> str:
        """Return the whole command to type, with the options that it carries on from others."""
        dials = self.dial_options.keys()
        taken = dials | {option.name for option in self.parameters}
        words = ["fedmerge", self.name, *map(as_argument, arguments)]
        for name in (own for own in carried if own in taken):
            words += self.known[name].words(given.get(name), is_dial=name in dials)
        return shlex.join(words)


def as_argument(path: str | Path) -> str:
    """Return a path that is no option, whatever its name starts with."""
    return f"./{path}" if isinstance(path, Path) and str(path).startswith("-") else str(path)


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


def parameter(option: Option, **callback: Any) -> inspect.Parameter:
    """Return the parameter from which typer makes an option or an argument."""
    described: Any
    if option.is_argument:
        metavar = f"{option.values}..." if option.is_repeatable else option.values
        described = typer.Argument(
            help=option.sentence, metavar=metavar, show_default=False, readable=False
        )
    else:
        described = typer.Option(
            *option.typed,
            help=option.sentence,
            metavar=option.values,
            show_default=False,
            autocompletion=_completion(words_in(option.values)),
            **callback,
        )
    is_open = not option.is_required and option.kind is not bool and option.start is None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.is_required else option.unset,
        annotation=Annotated[option.kind | None if is_open else option.kind, described],
    )


def words_in(values: str) -> tuple[str, ...]:
    """Return the words that an option takes as they are; those in capitals stand for others.

    >>> words_in("auto|cpu"), words_in("classification|FILE.py:NAME"), words_in("N")
    (('auto', 'cpu'), ('classification',), ())
    """
    return tuple(word for word in values.split("|") if re.fullmatch(r"[a-z][a-z0-9-]*", word))


def _completion(words: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Return what a shell asks; None leaves it to offer files."""

    def starting(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return starting if words else None
