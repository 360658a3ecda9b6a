"""The merge record: everything needed to check a merge, or to run it again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from msgspec import UNSET

from fedmerge.checkpoint import Checkpoint
from fedmerge.decoding import decode_value, shortened
from fedmerge.errors import ArchitectureError, CheckpointError
from fedmerge.graph import plan_from_json
from fedmerge.types.arrays import Float64Array, IntArray
from fedmerge.types.plans import Plan
from fedmerge.workflow.options import MatchOptions, RecordedOptions
from fedmerge.workflow.record_file import FORMAT as FORMAT
from fedmerge.workflow.record_file import SCHEMA as SCHEMA
from fedmerge.workflow.record_file import GroupEntry as GroupEntry
from fedmerge.workflow.record_file import (
    ProbesEntry,
    RecordedRounds,
    RecordFile,
    Similarities,
)
from fedmerge.workflow.record_file import SourceEntry as SourceEntry
from fedmerge.workflow.replay import check_says_no_more, file_beside

DIGITS = 4  # of cosines: more would only say how products were rounded
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
    assignments: Mapping[str, Mapping[str, IntArray]]  # client → group → (units,)
    tensors: Mapping[str, str]  # written name → SHA-256
    is_trained: bool  # in rounds: its tensors don't follow from the sources alone
    fitted: frozenset[str]  # tensors that don't either: they depend on the probes
    probes: ProbesEntry | None = None
    rounds: RecordedRounds | None = None  # the options of a run in rounds


def source_entry(client: Checkpoint) -> SourceEntry:
    """Return what the record says of a client."""
    file = client.path.name if client.path else ""
    return SourceEntry(client.name, file, client.sha256(), client.size)


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
            client: {group: np.array(units, dtype=np.int64) for group, units in groups.items()}
            for client, groups in file.assignments.items()
        },
        tensors=file.tensors,
        is_trained=file.retrain is not UNSET,
        fitted=frozenset(file.fitted),
        probes=file.probes,
        rounds=None if file.retrain is UNSET else file.retrain.options,
    )


def _check_format(value: Mapping[str, Any], source: str) -> None:
    found = value.get("format")
    if isinstance(found, int) and found != FORMAT:
        raise CheckpointError(
            f"{source}: its merge record has format {found}, expected {FORMAT}",
            f"it was written by fedmerge {shortened(str(value.get('fedmerge')))}",
        )


def _file_names(file: RecordFile) -> Iterator[str]:
    """Yield the files that a record names: its clients, but for those in memory, and probes."""
    yield from (source.file for source in file.sources if source.file)
    if file.probes is not None and file.probes.data is not None:
        yield file.probes.data


def rounded(similarities: Sequence[Float64Array]) -> Similarities:
    """Return cosines per client (units,) as the record keeps them."""
    return tuple(
        tuple(None if math.isnan(cosine) else round(cosine, DIGITS) for cosine in own.tolist())
        for own in similarities
    )


def group_entry(value: Mapping[str, Any]) -> GroupEntry:
    """Return the entry that JSON values describe."""
    return decode_value(value, GroupEntry, fail=CheckpointError)
