"""`--config`: options from a YAML or JSON file, or from the record of an earlier merge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from fedmerge.errors import FedmergeError, UsageError


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's options the defaults of the command that runs; the command line wins."""
    if path is not None:
        values = _read(path)
        replayed = {"options", "sources", "plan"} <= values.keys()
        defaults = _from_record(values, path.parent) if replayed else _from_options(values)
        _check_names(defaults, context, path)
        context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            from fedmerge.checkpoint import read_record

            return read_record(path)
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else _parse_yaml(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"--config {path.name} can't be read: {error}") from None
    except FedmergeError as error:
        raise UsageError(f"--config {error.problem}") from None
    if not isinstance(value, dict):
        raise UsageError(f"--config {path.name} must hold option names and values")
    return value


def _parse_yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _from_options(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {name.replace("-", "_"): value for name, value in values.items()}
    return {name: _as_argument(value) for name, value in given.items() if value is not None}


def _from_record(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options, the plan and the clients of a recorded merge.

    The clients are looked for, beside the record, only if the command line names none.
    """
    return {
        **_from_options(record["options"]),
        "plan": json.dumps(record["plan"]),
        "clients": lambda: _recorded_clients(record["sources"], folder),
    }


def _recorded_clients(sources: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    from fedmerge.checkpoint import open_checkpoint

    for source in sources:
        path = folder / source["file"]
        if open_checkpoint(path).sha256() != source["sha256"]:
            raise UsageError(
                f"{path} is not the file that was merged: its SHA-256 differs",
                "name the clients on the command line to merge other files with these options",
            )
    return [str(folder / source["file"]) for source in sources]


def _as_argument(value: Any) -> Any:
    """Return a value as the command line would give it: mappings as NAME=VALUE or inline JSON."""
    if not isinstance(value, dict):
        return value
    if all(isinstance(entry, int | float | str) for entry in value.values()):
        return [f"{name}={entry}" for name, entry in value.items()]
    return json.dumps(value)


def _check_names(values: Mapping[str, Any], context: typer.Context, path: Path) -> None:
    known = {str(parameter.name) for parameter in context.command.params}
    for name in values:
        if name not in known - {"config"}:
            raise UsageError(
                f"--config {path.name}: `{context.command_path}` has no option '{name}'",
                f"see `{context.command_path} --help`",
            )
