"""A record is data: the closed list of what it replays, and what only a command line may say.

A record replays the fields of `RecordedOptions` and, in `retrain`, of `RecordedRounds`, its own
plan, its probes, and its clients. These are names of files without folders, looked for beside the
record. Everything else that a command takes decides whom to trust, what runs, or what is read and
written where; a record that says any of it was not written by fedmerge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedmerge.decoding import shortened
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from fedmerge.workflow.options import RecordedOptions, option_name
from fedmerge.workflow.record_file import RecordedRounds, RecordFile, RetrainEntry

REPLAYED = frozenset(option.name for option in fields(RecordedOptions))
REPLAYED_ROUNDS = frozenset(option.name for option in fields(RecordedRounds))
REPLAYED_PROBES: Mapping[str, str] = {  # and what a record calls them
    "probe": "source",
    "probe_count": "count",
    "probe_mean": "mean",
    "probe_std": "std",
}

_READS = "it says which files are read"
_WRITES = "it says what is written where"
_RUNS = "it runs code"
_WORKS = "it says how a command works"
NEVER: Mapping[str, str] = {  # by a record, and why
    "allow_global": "it lets files name code",
    "force": "it lets files be overwritten",
    **dict.fromkeys(("model", "model_arg", "input_shape", "input_dtype", "state"), _RUNS),
    **dict.fromkeys(("output", "report", "graph", "frontier_plot", "events", "work_dir"), _WRITES),
    **dict.fromkeys(("resume", "shard_size"), _WRITES),
    **dict.fromkeys(
        ("config", "clients", "plan", "probe_data", "shards", "data", "merged"), _READS
    ),
    **dict.fromkeys(("image", "image_index", "image_group"), _READS),
    **dict.fromkeys(("json", "quiet", "verbose", "dry_run", "frontier"), _WORKS),
    **dict.fromkeys(("device", "threads", "engine", "workers", "address"), _WORKS),
    **dict.fromkeys(("cpus_per_client", "gpus_per_client", "threads_per_client"), _WORKS),
    **dict.fromkeys(("client_timeout", "retries", "min_clients"), _WORKS),
}
_UNSET: tuple[object, ...] = (None, [])  # as earlier records had it: "allow_global": []


def check_says_no_more(record: Mapping[str, Any], *, source: str) -> None:
    """Refuse a record that says what it never may, or that has unknown options."""
    retrain = _inner(record, "retrain")
    for part, kind in ((record, RecordFile), (retrain, RetrainEntry)):
        for name in part.keys() - {field.name for field in fields(kind)}:
            _check_never(name, part[name], source)
    if isinstance(record.get("plan"), str):
        _check_never("plan", record["plan"], source)
    for options, known in (
        (_inner(record, "options"), REPLAYED),
        (_inner(retrain, "options"), REPLAYED_ROUNDS),
    ):
        for name, value in options.items():
            if name not in known and not _check_never(name, value, source):
                raise CheckpointError(
                    f"{source}: its merge record is damaged "
                    f"(there is no option '{shortened(str(name))}')",
                    "merge again from the clients",
                )


def _check_never(name: object, value: object, source: str) -> bool:
    """Return whether a name is on the list; refuse it if it has a value."""
    option = str(name).lower().replace("-", "_")
    if option in NEVER and value not in _UNSET:
        raise UnsafeCheckpointError(
            f"{source}: refused, its merge record sets {option_name(option)}: {NEVER[option]}, so "
            "only a command line may",
            "do not trust this record; fedmerge writes none like it",
        )
    return option in NEVER


def file_beside(name: str, *, source: str) -> str:
    """Return a recorded file name if it is one: no folder, no way out of the record's folder."""
    is_name = Path(name).name == name and name not in ("", "..") and "\0" not in name
    if not is_name or Path(name).anchor:
        raise UnsafeCheckpointError(
            f"{source}: refused, its merge record names the file '{shortened(name)}', expected a "
            "name without folders",
            "do not trust this record; fedmerge writes none like it",
        )
    return name


def _inner(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in another one, whose types are checked later."""
    value = part.get(name)
    return value if isinstance(value, Mapping) else {}
