"""`--config`: options from a YAML or JSON file, or from the record of an earlier merge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import typer

from fedmerge.architecture import plan_to_json
from fedmerge.checkpoint import open_checkpoint, read_record
from fedmerge.cli.command_line import CONFIGURED, Command, Option
from fedmerge.cli.commands import COMMANDS
from fedmerge.decoding import decode_json, decode_value, decode_yaml, read_text, shortened
from fedmerge.errors import CheckpointError, UnsafeCheckpointError, UsageError
from fedmerge.merging.merge_record import REPLAYED, REPLAYED_PROBES, MergeRecord, record_from_json
from fedmerge.merging.options import MatchOptions
from fedmerge.user_code import is_reference

RECORDED = "fedmerge.recorded"  # in a context's meta: the record that gives the options
CONFIG = "fedmerge.config"  # in a context's meta: the user's own configuration
BY_HAND = ("allow_global", "force")  # only ever on the command line: they decide on trust
_NOT_OPTIONS = frozenset(("config", "set", "help", "help_all", *BY_HAND))
_OF_A_RECORD = frozenset({"options", "sources", "plan"})
_RUNS_CODE = ("model", "task", "data", "shards")  # the last three if they name code, not files

_Text: TypeAlias = str | int | float  # numbers need no quotes
_Texts: TypeAlias = _Text | list[_Text]
_KINDS: Mapping[Any, Any] = {  # of an option → what a configuration gives for it
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


def load_config(context: typer.Context, path: Path) -> None:
    """Make a file's options the defaults of the command that runs; the command line wins.

    What the file is, its content decides. A record is data, maybe a stranger's: it gives what
    `merging.merge_record` lists and nothing else. A configuration is the user's own word.
    """
    command = COMMANDS[str(context.command.name)]
    context.obj.command = command
    value = _read(path)
    if value.keys() >= _OF_A_RECORD:
        context.meta[RECORDED] = path.name
        defaults = replayed_defaults(value, path, context)
    else:
        context.meta[CONFIG] = path.name
        defaults = config_defaults(value, command, source=path.name)
        context.obj.json = context.obj.json or bool(defaults.get("json"))
    dials = command.dial_options
    context.meta[CONFIGURED] = {
        name: _of_dial(dials[name], defaults.pop(name)) for name in dials if name in defaults
    }
    context.default_map = {**(context.default_map or {}), **defaults}


def _of_dial(dial: Option, value: Any) -> Any:
    """Return what a file says of a dial as --set would."""
    if isinstance(value, list) and dial.is_repeatable:
        return [str(part) for part in value]
    return value if isinstance(value, list | bool) else dial.read(str(value))


def code_of_config(context: typer.Context, given: Mapping[str, Any]) -> list[str]:
    """Return what the user's configuration makes a command run, which a look at it may miss."""
    notes = []
    for name in _RUNS_CODE if CONFIG in context.meta else ():
        source = context.get_parameter_source(name) if given.get(name) is not None else None
        if source is not None and source.name == "DEFAULT_MAP":
            values = given[name] if isinstance(given[name], list) else [given[name]]
            code = [str(value) for value in values if name == "model" or is_reference(str(value))]
            notes += [f"--config {context.meta[CONFIG]} runs code: --{name} {own}" for own in code]
    return notes


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds: the record in safetensors or a shard index, else JSON or YAML."""

    def fail(reason: str) -> UsageError:
        return UsageError(f"--config {path.name} can't be read: {reason}")

    if _begins_as_safetensors(path):
        return _record_inside(path)
    content = read_text(path, fail=fail)
    try:
        value = decode_json(content, Any, fail=fail)
    except UsageError:
        if path.suffix == ".json":
            raise
        value = decode_yaml(content.decode(errors="replace"), Any, fail=fail)
    if not isinstance(value, dict):
        raise UsageError(f"--config {path.name} must hold option names and values")
    return _record_inside(path) if "weight_map" in value else value


def _begins_as_safetensors(path: Path) -> bool:
    """Whether a file begins with the length of a JSON header; no text has such null characters."""
    from fedmerge.decoding import open_file

    if str(path).startswith("/dev/"):  # a pipe of the shell, which can be read but once
        return False
    try:
        with open(path, "rb", opener=open_file) as file:
            head = file.read(9)
    except OSError:
        return False  # which reading it as text will tell
    return head[4:8] == bytes(4) and head[8:] == b"{"


def _record_inside(path: Path) -> dict[str, Any]:
    """Return the record in a merged file; it is one, whatever it lacks."""
    try:
        return {**dict.fromkeys(_OF_A_RECORD), **read_record(path)}
    except CheckpointError as error:
        raise UsageError(f"--config {error.problem}", error.hint) from None


def configurable() -> list[Command]:
    """Return the commands that take a configuration."""
    return [command for command in COMMANDS.values() if "config" in command.names]


def config_options(command: Command) -> dict[str, Option]:
    """Return what a configuration of a command may set, by name."""
    options = (*command.parameters, *command.dial_options.values())
    return {own.name: own for own in options if own.name not in _NOT_OPTIONS}


def config_type(command: Command) -> type[msgspec.Struct]:
    """Return the type of a command's configuration: names with dashes, all of them optional."""
    fields = [(name, _kind_of(own) | None, None) for name, own in config_options(command).items()]
    return msgspec.defstruct(
        f"{command.name.capitalize()}Config",
        [*fields, ("schema", Literal[1] | None, None)],
        rename="kebab",
        forbid_unknown_fields=True,
    )


def config_defaults(values: Mapping[str, Any], command: Command, *, source: str) -> dict[str, Any]:
    """Return the defaults that the user's configuration sets, as a command line gives them."""
    options = config_options(command)
    given = {str(key).replace("_", "-"): value for key, value in values.items()}
    for key in given:
        _check_name(key, {*options, "schema"}, command, source)
    config = decode_value(
        given,
        config_type(command),
        fail=lambda reason: UsageError(f"--config {source}: {reason}", _see(command)),
    )
    found = {k: v for k, v in msgspec.structs.asdict(config).items() if v is not None}
    found.pop("schema", None)
    defaults = {
        key: [value] if options[key].is_repeatable and isinstance(value, _Text) else value
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


def _kind_of(option: Option) -> Any:
    kind = _KINDS[option.kind]
    return kind | _MAPPINGS[option.name] if option.name in _MAPPINGS else kind


def _check_name(key: str, known: set[str], command: Command, source: str) -> None:
    name = key.replace("-", "_")
    if name in BY_HAND:
        raise UsageError(
            f"--config {source} sets `{name}`, which only the command line may",
            f"give `{name}` there",
        )
    if name not in known:
        raise UsageError(
            f"--config {source}: `fedmerge {command.name}` has no option '{shortened(key)}'",
            _see(command),
        )


def _see(command: Command) -> str:
    return f"see `fedmerge {command.name} --help-all`"


_NAME_THEM = "name the clients on the command line: they are looked for beside the record"
_TASKS = ("classification", "language-model")  # all others are code
_AGAIN = "a record admits nothing: give it on this command line, too"


def replayed_defaults(
    value: Mapping[str, Any], path: Path, context: typer.Context
) -> dict[str, Any]:
    """Return the options, the plan, the probes and the clients of a recorded merge.

    A command takes what it knows. The clients are looked for, beside the record, only if the
    command line names none.
    """
    record = record_from_json(value, source=path.name)
    options = {name: getattr(record.options, name) for name in REPLAYED}
    if context.command.name == "retrain":
        options |= {"method": None} if record.rounds is None else vars(record.rounds)
    given = as_arguments({**options, **_probes(record, path.parent)})
    given["plan"] = json.dumps(plan_to_json(record.plan))
    if any(source.file for source in record.sources):
        given["clients"] = lambda: _clients(record, path.parent, context)
    if given.get("task", _TASKS[0]) not in _TASKS:
        given["task"] = lambda: _refuse_task(record, path.name)
    known = COMMANDS[str(context.command.name)].names
    return {name: default for name, default in given.items() if name in known}


def _probes(record: MergeRecord, folder: Path) -> dict[str, Any]:
    """Return the options of recorded probes; real inputs are looked for beside the record."""
    probes = record.probes
    if probes is None:
        return {"probe": "none"}
    prepared = probes.preparation
    normalize = "" if prepared is None else ",".join(map(str, (*prepared.mean, *prepared.std)))
    said = {option: getattr(probes, name) for option, name in REPLAYED_PROBES.items()}
    return {
        **{o: ",".join(map(str, v)) if isinstance(v, tuple) else v for o, v in said.items()},
        "probe_data": None if probes.data is None else str(folder / probes.data),
        "normalize": normalize or None,
        "channels_last": prepared is not None and prepared.channels_last,
    }


def _clients(record: MergeRecord, folder: Path, context: typer.Context) -> list[str]:
    """Return the recorded clients' paths, or refuse if they are other files by now.

    What the command line said is known by then: it alone admits classes.
    """
    said = {name: context.params.get(name) for name in ("key", "weights", "allow_global")}
    own = {name: getattr(record.options, name) for name in ("key", "weights")}
    chosen = {name: value for name, value in said.items() if value is not None}
    options = MatchOptions(**{**own, **chosen, "allow_global": tuple(said["allow_global"] or ())})
    found: list[str] = []
    for source in record.sources:
        path = folder / source.file
        if str(path) in found:
            raise UsageError(f"the record names {source.file} twice, as of two folders", _NAME_THEM)
        try:
            digest = open_checkpoint(path, options.reading).sha256()
        except UnsafeCheckpointError as error:
            again = f"; {_AGAIN}" if "`allow_global=" in error.hint else ""
            raise UnsafeCheckpointError(error.problem, error.hint + again) from None
        except CheckpointError as error:
            raise UsageError(
                f"a recorded client can't be read: {error.problem}", _NAME_THEM
            ) from None
        if digest != source.sha256:
            raise UsageError(
                f"{path} is not the file that was merged: its SHA-256 differs", _NAME_THEM
            )
        found.append(str(path))
    return found


def _refuse_task(record: MergeRecord, source: str) -> None:
    assert record.rounds is not None
    raise UnsafeCheckpointError(
        f"{source}: its merge record sets --task to code, {record.rounds.task!r}, which only a "
        "command line may",
        "give --task again if you trust that code",
    )
