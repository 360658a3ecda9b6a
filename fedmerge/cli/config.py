"""`--config`: options from a YAML or JSON file, or from the record of an earlier merge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fedmerge.errors import CheckpointError, UsageError

RECORDED = "fedmerge.recorded"  # in a context's meta: the record that gives the options
CONFIG = "fedmerge.config"  # in a context's meta: the user's own configuration
_OF_A_RECORD = frozenset({"options", "sources", "plan"})
_RUNS_CODE = ("model", "task", "data", "shards")  # the last three if they name code, not files


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's options the defaults of the command that runs; the command line wins.

    What the file is, its content decides. A record is data, maybe a stranger's: it gives what
    `workflow.replay` lists and nothing else. A configuration is the user's own word.
    """
    if path is not None:
        value = _read(path)
        if value.keys() >= _OF_A_RECORD:
            from fedmerge.cli.replay import replayed_defaults

            context.meta[RECORDED] = path.name
            defaults = replayed_defaults(value, path, context)
        else:
            from fedmerge.cli.config_types import config_defaults

            context.meta[CONFIG] = path.name
            defaults = config_defaults(value, str(context.command.name), source=path.name)
            context.obj.json = context.obj.json or bool(defaults.get("json"))
        context.default_map = {**(context.default_map or {}), **defaults}
    return path


def code_of_config(context: typer.Context, given: Mapping[str, Any]) -> list[str]:
    """Return what the user's configuration makes a command run, which a look at it may miss."""
    from fedmerge.references import is_reference

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
    from fedmerge.decoding import decode_json, decode_yaml, read_text

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
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError:
        return False  # which reading it as text will tell
    return head[4:8] == bytes(4) and head[8:] == b"{"


def _record_inside(path: Path) -> dict[str, Any]:
    """Return the record in a merged file; it is one, whatever it lacks."""
    from fedmerge.checkpoint import read_record

    try:
        return {**dict.fromkeys(_OF_A_RECORD), **read_record(path)}
    except CheckpointError as error:
        raise UsageError(f"--config {error.problem}", error.hint) from None
