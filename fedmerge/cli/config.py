"""`--config`: options from a YAML or JSON file, or from the record of an earlier merge."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from fedmerge.errors import CheckpointError, FedmergeError, UsageError

RECORDED = "fedmerge.recorded"  # in a context's meta: the options are those of a record


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's options the defaults of the command that runs; the command line wins."""
    if path is not None:
        values = _read(path)
        try:
            is_record = {"options", "sources", "plan"} <= values.keys()
            if is_record and context.command.name == "retrain":
                values = _with_rounds(values)
            defaults = _from_record(values, path.parent) if is_record else _from_options(values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"--config {path.name} is damaged: {error!r}") from None
        known = {str(parameter.name) for parameter in context.command.params} - {"config"}
        if is_record:  # of a merge: other commands take what they know
            context.meta[RECORDED] = True
            defaults = {name: value for name, value in defaults.items() if name in known}
        _check_names(defaults, known, context.command_path, path)
        context.default_map = {**(context.default_map or {}), **_listed(defaults, context)}
        context.obj.json = context.obj.json or bool(defaults.get("json"))
    return path


def _listed(defaults: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """Return the defaults with single values of repeatable options as lists."""
    repeatable = {p.name for p in context.command.params if getattr(p, "multiple", False)}
    return {
        name: [value] if name in repeatable and isinstance(value, str) else value
        for name, value in defaults.items()
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.name.endswith((".safetensors", ".index.json")):
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
    given = {str(name).replace("-", "_"): value for name, value in values.items()}
    return {name: _as_argument(value) for name, value in given.items() if value is not None}


def _with_rounds(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the options of its rounds, if it has any, among the others."""
    rounds = record.get("retrain", {}).get("options", {"method": None})
    return {**record, "options": {**record["options"], **rounds}}


def _from_record(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options, the plan and the clients of a recorded merge.

    The clients are looked for, beside the record, only if the command line names none.
    """
    options = _from_options(record["options"])
    files = [source for source in record["sources"] if source["file"]]  # not those in memory
    digests = {str(folder / source["file"]): source["sha256"] for source in files}
    clients = {"clients": lambda: _recorded_clients(digests, options)} if files else {}
    probes = _recorded_probes(record.get("probes"), folder)
    return {**options, **probes, "plan": json.dumps(record["plan"]), **clients}


def _recorded_probes(probes: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return the options of recorded probes; real inputs are looked for beside the record."""
    if probes is None:
        return {"probe": "none"}
    file = probes["data"]
    given = {
        "probe": probes["source"],
        "probe_data": None if file is None else str(folder / file),
        "probe_count": probes["count"],
        "probe_mean": ",".join(map(str, probes["mean"])),
        "probe_std": ",".join(map(str, probes["std"])),
    }
    return {name: value for name, value in given.items() if value is not None}


def _recorded_clients(digests: Mapping[str, str], options: Mapping[str, Any]) -> list[str]:
    """Return the recorded clients' paths, or refuse if they are other files by now."""
    from fedmerge.checkpoint import ReadOptions, open_checkpoint

    reading = ReadOptions(
        options.get("key"), options.get("weights"), tuple(options.get("allow_global") or ())
    )
    hint = "name the clients on the command line: they are looked for beside the record"
    for path, digest in digests.items():
        try:
            found = open_checkpoint(path, reading).sha256()
        except CheckpointError as error:
            raise UsageError(f"a recorded client can't be read: {error.problem}", hint) from None
        if found != digest:
            raise UsageError(f"{path} is not the file that was merged: its SHA-256 differs", hint)
    return list(digests)


def _as_argument(value: Any) -> Any:
    """Return a value as the command line would give it: mappings as NAME=VALUE or inline JSON."""
    if not isinstance(value, dict):
        return value
    if all(isinstance(entry, int | float | str) for entry in value.values()):
        return [f"{name}={entry}" for name, entry in value.items()]
    return json.dumps(value)


def _check_names(names: Iterable[str], known: Collection[str], command: str, path: Path) -> None:
    for name in names:
        if name not in known:
            raise UsageError(
                f"--config {path.name}: `{command}` has no option '{name}'",
                f"see `{command} --help`",
            )
