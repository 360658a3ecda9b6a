"""A recorded merge as the defaults of a command: what the record may say, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fedmerge.checkpoint import open_checkpoint
from fedmerge.cli.config_types import as_arguments
from fedmerge.errors import CheckpointError, UnsafeCheckpointError, UsageError
from fedmerge.graph import plan_to_json
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.record import MergeRecord, record_from_json
from fedmerge.workflow.replay import REPLAYED, REPLAYED_PROBES

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
    known = {str(parameter.name) for parameter in context.command.params}
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
            again = f"; {_AGAIN}" if "--allow-global" in error.hint else ""
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
