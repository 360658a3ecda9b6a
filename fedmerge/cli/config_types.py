"""What a configuration may hold: a type per command, made from the parameters that it takes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from fedmerge.cli.commands import COMMANDS, Command
from fedmerge.decoding import decode_value, shortened
from fedmerge.errors import UsageError
from fedmerge.workflow.options import option_name

BY_HAND = ("allow_global", "force")  # only ever on the command line: they decide on trust
_NOT_OPTIONS = ("config", "context", *BY_HAND)

_Text: TypeAlias = str | int | float  # numbers need no quotes
_Texts: TypeAlias = _Text | list[_Text]
_KINDS: Mapping[Any, Any] = {  # of a parameter → what a configuration gives for it
    bool: bool,
    int: int,
    float: float,
    str: _Text,
    Path: str,
    list[str]: _Texts,
    list[Path]: _Texts,
}
_MAPPINGS: Mapping[str, Any] = {  # options that may be given as a mapping, too
    "client_weight": dict[str, int | float],
    "model_arg": dict[str, str | int | float | bool],
    "class_counts": dict[str, list[int | float]],
}


def configurable() -> list[Command]:
    """Return the commands that take a configuration."""
    return [c for c in COMMANDS if any(p.name == "config" for p in c.parameters)]


def config_type(command: Command) -> type[msgspec.Struct]:
    """Return the type of a command's configuration: names with dashes, all of them optional."""
    fields: list[tuple[str, Any, Any]] = [
        (parameter.name, _kind_of(parameter) | None, None)
        for parameter in command.parameters
        if parameter.name not in _NOT_OPTIONS
    ]
    return msgspec.defstruct(
        f"{command.name.capitalize()}Config",
        [*fields, ("schema", Literal[1] | None, None)],
        rename="kebab",
        forbid_unknown_fields=True,
    )


def config_defaults(values: Mapping[str, Any], name: str, *, source: str) -> dict[str, Any]:
    """Return the defaults that the user's configuration sets, as a command line gives them."""
    command = next(command for command in COMMANDS if command.name == name)
    known = {parameter.name for parameter in command.parameters} - {*_NOT_OPTIONS} | {"schema"}
    given = {str(key).replace("_", "-"): value for key, value in values.items()}
    for key in given:
        _check_name(key, known, command, source)
    config = decode_value(
        given,
        config_type(command),
        fail=lambda reason: UsageError(f"--config {source}: {reason}", _see(command)),
    )
    found = {k: v for k, v in msgspec.structs.asdict(config).items() if v is not None}
    found.pop("schema", None)
    repeatable = {p.name for p in command.parameters if _is_list(p)}
    defaults = {
        key: [value] if key in repeatable and isinstance(value, _Text) else value
        for key, value in as_arguments(found).items()
    }
    if any("\0" in text for value in defaults.values() for text in _texts(value)):
        raise UsageError(f"--config {source}: a text holds a null character")
    return defaults


def _texts(value: Any) -> list[str]:
    return list(map(str, value if isinstance(value, list) else [value]))


def as_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as the command line would give them; None is not given."""
    return {name: _as_argument(name, v) for name, v in values.items() if v is not None}


def _as_argument(name: str, value: Any) -> Any:
    if name == "class_counts" and isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, Mapping):
        return [f"{key}={entry}" for key, entry in value.items()]
    return [str(entry) for entry in value] if isinstance(value, list | tuple) else value


def _kind_of(parameter: inspect.Parameter) -> Any:
    kind = _annotated(parameter)
    return _KINDS[kind] | _MAPPINGS[parameter.name] if parameter.name in _MAPPINGS else _KINDS[kind]


def _is_list(parameter: inspect.Parameter) -> bool:
    return parameter.name not in _NOT_OPTIONS and _annotated(parameter) in (list[str], list[Path])


def _annotated(parameter: inspect.Parameter) -> Any:
    """Return the type that an option takes, without the None of those that may be left out."""
    kind = get_args(parameter.annotation)[0]
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind


def _check_name(key: str, known: set[str], command: Command, source: str) -> None:
    name = key.replace("-", "_")
    if name in BY_HAND:
        raise UsageError(
            f"--config {source} sets {option_name(name)}, which only the command line may",
            f"give {option_name(name)} there",
        )
    if name not in known:
        raise UsageError(
            f"--config {source}: `fedmerge {command.name}` has no option '{shortened(key)}'",
            _see(command),
        )


def _see(command: Command) -> str:
    return f"see `fedmerge {command.name} --help`"
