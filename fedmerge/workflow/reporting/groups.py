"""What a record says of every group: who shares what, and how alike that is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedmerge.report import GroupView, Match
from fedmerge.workflow.record import GroupEntry, MergeRecord

AVERAGED = "Units were taken to correspond by their place, so nothing was compared."
APART = "No unit has a fellow: no match, no cost."
UNRECORDED = (
    "The record has no match costs (written by an earlier fedmerge, or clients missed the round)."
)


def group_views(record: MergeRecord) -> tuple[GroupView, ...]:
    """Return what became of every group."""
    return tuple(_view(record, entry) for entry in record.groups)


def _view(record: MergeRecord, entry: GroupEntry) -> GroupView:
    clients = [source.name for source in record.sources]
    counts = np.zeros(entry.width, dtype=np.int64)
    for client in clients:
        counts[record.assignments[client][entry.name]] += 1
    known = [c for own in entry.similarities for c in own if c is not None]
    matches = sorted(_matches(record, entry), key=lambda match: -match.similarity)
    return GroupView(
        name=entry.name,
        client_widths=entry.client_widths,
        width=entry.width,
        padding=entry.padding,
        match_rate=entry.match_rate,
        scatter=entry.scatter,
        owners=tuple(int((counts == owners).sum()) for owners in range(1, len(clients) + 1)),
        threshold=entry.threshold,
        similarities=tuple(known),
        matches=tuple(matches),
        unknown="" if known else _why_unknown(record, entry),
    )


def _matches(record: MergeRecord, entry: GroupEntry) -> Iterator[Match]:
    """Yield every global unit whose owners were compared."""
    owners: dict[int, list[tuple[str, int, float]]] = {}
    for source, own in zip(record.sources, entry.similarities, strict=False):
        units = record.assignments[source.name][entry.name].tolist()
        for number, (unit, cosine) in enumerate(zip(units, own, strict=True)):
            if cosine is not None:
                owners.setdefault(unit, []).append((source.name, number, cosine))
    for unit, members in owners.items():
        mean = sum(cosine for _, _, cosine in members) / len(members)
        yield Match(unit, tuple((client, number) for client, number, _ in members), mean)


def _why_unknown(record: MergeRecord, entry: GroupEntry) -> str:
    if entry.match_rate == 0:
        return APART
    if entry.scatter is None or record.options.method == "average":
        return AVERAGED
    return UNRECORDED
