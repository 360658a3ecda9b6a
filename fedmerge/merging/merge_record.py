"""The merge record: read, checked against files and plan, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from fedmerge.architecture import plan_from_json, solve_widths
from fedmerge.checkpoint import Checkpoint
from fedmerge.decoding import decode_value, shortened
from fedmerge.errors import ArchitectureError, CheckpointError, FedmergeError, UnsafeCheckpointError
from fedmerge.merging.adapters import is_adapter_record
from fedmerge.merging.options import MatchOptions, RecordedOptions, option_name
from fedmerge.merging.record_schema import (
    FORMAT,
    GroupEntry,
    ProbesEntry,
    RecordedRounds,
    RecordFile,
    RetrainEntry,
    SourceEntry,
)
from fedmerge.values.arrays import IntArray
from fedmerge.values.plans import Assignment, Plan

REPLAYED = frozenset(option.name for option in fields(RecordedOptions))
REPLAYED_ROUNDS = frozenset(option.name for option in fields(RecordedRounds))
REPLAYED_PROBES: Mapping[str, str] = {  # and what a record calls them
    "probe": "source",
    "probe_count": "count",
    "probe_mean": "mean",
    "probe_std": "std",
    "augment": "augment",
}

_READS = "it says which files are read"
_WRITES = "it says what is written where"
_RUNS = "it runs code"
_WORKS = "it says how a command works"
NEVER: Mapping[str, str] = {  # by a record, and why
    "allow_global": "it lets files name code",
    "force": "it lets files be overwritten",
    **dict.fromkeys(
        ("model", "model_arg", "input_shape", "input_dtype", "numbers", "state", "logger"), _RUNS
    ),
    "client_names": "it says whose data are read",
    **dict.fromkeys(("output", "report", "graph", "frontier_plot", "events", "work_dir"), _WRITES),
    **dict.fromkeys(("resume", "shard_size"), _WRITES),
    **dict.fromkeys(
        ("config", "clients", "base", "plan", "probe_data", "shards", "data", "merged"), _READS
    ),
    **dict.fromkeys(("image", "image_index", "image_group"), _READS),
    **dict.fromkeys(("json", "quiet", "verbose", "dry_run", "frontier", "require"), _WORKS),
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


_AGAIN = "merge again from the clients"


@dataclass(frozen=True)
class MergeRecord:
    """A merge record as read from a file; its options trust nobody (`allow_global` is empty)."""

    options: MatchOptions
    sources: tuple[SourceEntry, ...]
    plan: Plan
    groups: tuple[GroupEntry, ...]
    parameters: int
    growth: float
    # client → group → (units,), or (outer units, units) of a group inside another one
    assignments: Mapping[str, Mapping[str, IntArray]]
    tensors: Mapping[str, str]  # written name → SHA-256
    is_trained: bool  # in rounds: its tensors don't follow from the sources alone
    fitted: frozenset[str]  # tensors that don't either: they depend on probes or couplings
    probes: ProbesEntry | None = None
    is_program: bool = False  # clients as branches: no widths, no assignments
    base: SourceEntry | None = None  # the model that the sources are fine-tunes of
    rounds: RecordedRounds | None = None  # the options of a run in rounds

    def numbers(self, client: str, group: str) -> IntArray:
        """Return the global units (units,) of a client's units, counted over all outer ones."""
        widths = {entry.name: entry.width for entry in self.groups}
        placed = {
            name: Assignment(self.assignments[client][name], widths[name])
            for name in (group, self.plan.inside.get(group))
            if name is not None
        }
        return placed[group].numbers(placed.get(self.plan.inside.get(group, "")))


def record_from_json(value: Any, *, source: str) -> MergeRecord:
    """Return the record that JSON values describe, or say that it is damaged or unsafe."""

    def damaged(reason: str) -> CheckpointError:
        return CheckpointError(f"{source}: its merge record is damaged ({reason})", _AGAIN)

    if not isinstance(value, dict):
        raise damaged("it is no JSON object")
    _check_format(value, source)
    check_says_no_more(value, source=source)
    file = decode_value(value, RecordFile, fail=damaged)
    for name in _file_names(file):
        file_beside(name, source=source)
    try:
        plan = plan_from_json(value["plan"])
    except ArchitectureError as error:
        raise damaged(error.problem) from error
    return MergeRecord(
        options=MatchOptions(
            **{field.name: getattr(file.options, field.name) for field in fields(RecordedOptions)}
        ),
        sources=file.sources,
        plan=plan,
        groups=file.groups,
        parameters=file.parameters,
        growth=file.growth,
        assignments={
            client: {group: _places(group, units, damaged) for group, units in groups.items()}
            for client, groups in file.assignments.items()
        },
        tensors=file.tensors,
        is_trained=file.retrain is not UNSET,
        fitted=frozenset(file.fitted),
        probes=file.probes,
        is_program=file.is_program,
        base=file.base_model,
        rounds=None if file.retrain is UNSET else file.retrain.options,
    )


def _places(
    group: str, units: Sequence[int | Sequence[int]], damaged: Callable[[str], CheckpointError]
) -> IntArray:
    """Return an assignment (units,) or (outer units, units) of a record."""
    if len({len(row) if isinstance(row, Sequence) else None for row in units}) > 1:
        raise damaged(f"the assignment of group '{group}' has rows of different lengths")
    return np.array(units, dtype=np.int64)


def _check_format(value: Mapping[str, Any], source: str) -> None:
    if is_adapter_record(value):
        raise CheckpointError(
            f"{source}: the record of merged LoRA adapters, which have no units",
            "`fedmerge verify` checks it; merge again with `fedmerge match`",
        )
    found = value.get("format")
    if isinstance(found, int) and found != FORMAT:
        raise CheckpointError(
            f"{source}: its merge record has format {found}, expected {FORMAT}",
            f"it was written by fedmerge {shortened(str(value.get('fedmerge')))}",
        )


def _file_names(file: RecordFile) -> Iterator[str]:
    """Yield the files that a record names: its clients, but for those in memory, and probes."""
    given = [*file.sources, *([] if file.base_model is None else [file.base_model])]
    yield from (source.file for source in given if source.file)
    if file.probes is not None and file.probes.data is not None:
        yield file.probes.data


def group_entry(value: Mapping[str, Any]) -> GroupEntry:
    """Return the entry that JSON values describe."""
    return decode_value(value, GroupEntry, fail=CheckpointError)


def consistent_record(
    value: object, *, source: str, checkpoint: Checkpoint | None = None
) -> MergeRecord:
    """Return the record that JSON values describe; refuse one that contradicts itself or its file.

    Widths and assignments can be worked with then: no array is larger than the record itself.
    """
    record = record_from_json(value, source=source)
    if record.is_program:
        raise ArchitectureError(
            f"{source}: an ensemble as a program, in which no units are merged",
            "merge again with an output that ends in .pt",
        )
    own = () if checkpoint is None else shape_differences(checkpoint, record)
    for difference in chain(assignment_differences(record), own):
        raise CheckpointError(
            f"{source}: its merge record is damaged ({difference})", "merge again from the clients"
        )
    return record


def shape_differences(checkpoint: Checkpoint, record: MergeRecord) -> Iterator[str]:
    """Compare the widths that the tensors' shapes give with the recorded ones."""
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    try:
        widths = solve_widths(record.plan, shapes, source=checkpoint.name)
    except FedmergeError as error:
        yield error.problem
        return
    for entry in record.groups:
        if widths.get(entry.name) != entry.width:
            found = widths.get(entry.name)
            yield f"group '{entry.name}' is {found} wide in the file, {entry.width} in the record"


def assignment_differences(record: MergeRecord) -> Iterator[str]:
    """Check that assignments are injective, in range, and together cover every global unit."""
    names = [source.name for source in record.sources]
    groups = [group.name for group in record.plan.groups]
    if sorted(record.assignments) != sorted(names):
        yield "the record's assignments and sources name different clients"
        return
    listed = {"the record's widths": [entry.name for entry in record.groups]}
    listed |= {f"{name}'s assignments": list(record.assignments[name]) for name in names}
    for what, found in listed.items():
        if sorted(found) != sorted(groups):
            odd = [*sorted(set(groups).symmetric_difference(found)), *found][0]
            how = "missing" if odd not in found else "unknown or there twice"
            yield f"{what} are not those of the plan's groups: '{odd}' is {how}"
            return
    widest = max((entry.width - entry.padding for entry in record.groups), default=0)
    for entry in record.groups:
        yield from _group_differences(record, entry, names, widest)


def _group_differences(
    record: MergeRecord, entry: GroupEntry, names: Sequence[str], widest: int
) -> Iterator[str]:
    """Check one group; nothing is made as long as its width says before that is known to be true.

    `widest` is the most units that clients have in any group: none is padded beyond it.
    """
    matched = entry.width - entry.padding
    covered = np.empty(0, dtype=np.int64)
    for name, width in zip(names, entry.client_widths, strict=False):
        units = record.assignments[name][entry.name]
        where = f"{name}'s assignment of group '{entry.name}'"
        yield from _row_differences(record, entry.name, name, where)
        if units.shape[-1] != width:
            yield f"{where} has {units.shape[-1]} units, its recorded width is {width}"
        ordered = np.sort(units, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            yield f"{where} gives two units the same global unit"
        if units.size and not 0 <= units.min() <= units.max() < matched:
            yield f"{where} leaves the range of 0 to {matched - 1}"
        covered = np.union1d(covered, units[units >= 0])
    yield from _leader_differences(record, entry, names)
    sizes = [record.assignments[name][entry.name].size for name in names]
    if len(entry.client_widths) != len(names):
        yield f"group '{entry.name}' has {len(entry.client_widths)} recorded widths"
    elif entry.similarities and [*map(len, entry.similarities)] != sizes:
        yield f"group '{entry.name}' has similarities of other units than its clients'"
    missing = int(np.argmax(np.append(covered, -1) != np.arange(len(covered) + 1)))
    if missing < matched:
        yield f"global unit {missing} of group '{entry.name}' belongs to no client"
    if matched > sum(record.assignments[name][entry.name].shape[-1] for name in names):
        yield f"group '{entry.name}' is wider than all clients together"
    if entry.width > max(widest, matched):
        yield f"group '{entry.name}' is padded to {entry.width} units, no group has so many"


def _leader_differences(
    record: MergeRecord, entry: GroupEntry, names: Sequence[str]
) -> Iterator[str]:
    """Check that every unit that stands for one client's is among that client's."""
    if not entry.leaders:
        return
    leaders = np.array(entry.leaders, dtype=np.int64)
    owned = [record.assignments[name][entry.name] for name in names]
    if len(leaders) != entry.width - entry.padding or any(own.ndim > 1 for own in owned):
        yield f"group '{entry.name}' has leaders of other units than its own"
    elif not all(
        np.isin(np.flatnonzero(leaders == client), own).all() for client, own in enumerate(owned)
    ) or leaders.max(initial=0) >= len(names):
        yield f"group '{entry.name}' has a leader that does not own its unit"


def _row_differences(record: MergeRecord, group: str, name: str, where: str) -> Iterator[str]:
    """Check that an assignment has one row for every outer unit, or one for all."""
    units, outer = record.assignments[name][group], record.plan.inside.get(group)
    if units.ndim == 1:
        return
    expected = "one for all" if outer is None else len(record.assignments[name][outer])
    if len(units) != expected:
        yield f"{where} has {len(units)} rows, expected {expected}"
