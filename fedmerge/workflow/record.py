"""The merge record: everything needed to check a merge, or to run it again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import ArchitectureError, CheckpointError, UsageError
from fedmerge.graph import plan_from_json
from fedmerge.types.arrays import Float64Array, IntArray
from fedmerge.types.plans import Plan
from fedmerge.workflow.options import MatchOptions, options_from_json

FORMAT = 1
DIGITS = 4  # of cosines: more would only say how products were rounded

Similarities: TypeAlias = tuple[tuple[float | None, ...], ...]  # None: a unit without fellows


@dataclass(frozen=True)
class GroupEntry:
    """What the record says of one group."""

    name: str
    client_widths: tuple[int, ...]
    width: int  # global units
    padding: int  # of these, units of no client that keep recurrent layers equally wide
    match_rate: float  # share of the clients' units whose global unit has another owner
    scatter: float | None  # squared distance of units to their mean ÷ squared norm, 0 for copies
    threshold: float | None = None  # cosine above which units paired up, where one was set
    similarities: Similarities = ()  # per client (units,); none: not known

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return {
            **vars(self),
            "client_widths": list(self.client_widths),
            "similarities": [list(own) for own in self.similarities],
        }

    def summary(self) -> dict[str, Any]:
        """Return the entry without what there is of every unit."""
        lasting = self.to_json()
        del lasting["similarities"], lasting["threshold"]
        return lasting


@dataclass(frozen=True)
class SourceEntry:
    """What the record says of one client: its file's name without folders, and its hash."""

    name: str
    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class MergeRecord:
    """A merge record as read from a file."""

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


def source_entry(client: Checkpoint) -> SourceEntry:
    """Return what the record says of a client."""
    file = client.path.name if client.path else ""
    return SourceEntry(client.name, file, client.sha256(), client.size)


def record_from_json(value: Any, *, source: str) -> MergeRecord:
    """Return the record that JSON values describe, or say that it is damaged."""
    try:
        _check_format(value, source)
        return MergeRecord(
            options=options_from_json(value["options"]),
            sources=tuple(SourceEntry(**entry) for entry in value["sources"]),
            plan=plan_from_json(value["plan"]),
            groups=tuple(group_entry(group) for group in value["groups"]),
            parameters=int(value["parameters"]),
            growth=float(value["growth"]),
            assignments=_assignments(value["assignments"]),
            tensors=dict(value["tensors"]),
            is_trained="retrain" in value,
            fitted=frozenset(value.get("fitted", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
    except (UsageError, ArchitectureError) as error:
        reason = error.problem
    raise CheckpointError(
        f"{source}: its merge record is damaged ({reason})", "merge again from the clients"
    )


def _check_format(value: Any, source: str) -> None:
    if value["format"] != FORMAT:
        raise CheckpointError(
            f"{source}: its merge record has format {value['format']}, expected {FORMAT}",
            f"it was written by fedmerge {value['fedmerge']}",
        )


def rounded(similarities: Sequence[Float64Array]) -> Similarities:
    """Return cosines per client (units,) as the record keeps them."""
    return tuple(
        tuple(None if math.isnan(cosine) else round(cosine, DIGITS) for cosine in own.tolist())
        for own in similarities
    )


def group_entry(value: Mapping[str, Any]) -> GroupEntry:
    """Return the entry that JSON values describe."""
    listed = {
        "client_widths": tuple(value["client_widths"]),
        "similarities": tuple(map(tuple, value.get("similarities", ()))),
    }
    entry = GroupEntry(**{**value, **listed})
    if not all(type(n) is int for n in (*entry.client_widths, entry.width, entry.padding)):
        raise ValueError(f"group {entry.name} has a width that is no whole number")
    return entry


def _assignments(
    value: Mapping[str, Mapping[str, Sequence[int]]],
) -> dict[str, dict[str, IntArray]]:
    return {
        client: {group: _integers(units) for group, units in groups.items()}
        for client, groups in value.items()
    }


def _integers(units: Sequence[int]) -> IntArray:
    if not all(type(unit) is int for unit in units):
        raise ValueError("an assignment holds something else than whole numbers")
    return np.array(units, dtype=np.int64)
