"""`verify`: a merged file against its record, and against the clients it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmerge.checkpoint import (
    Checkpoint,
    array_digest,
    expand_paths,
    open_checkpoint,
    read_record,
)
from fedmerge.errors import FedmergeError
from fedmerge.graph import solve_widths
from fedmerge.types.assignments import Assignment
from fedmerge.types.progress import Progress, silent
from fedmerge.workflow.clients import open_clients
from fedmerge.workflow.match import prepare
from fedmerge.workflow.merge import Merge, averaging_for
from fedmerge.workflow.options import dials_for
from fedmerge.workflow.record import MergeRecord, record_from_json


@dataclass(frozen=True)
class Verification:
    """What was checked, and every difference that was found."""

    tensors: int
    recomputed: int  # how many clients the global tensors were recomputed from; 0: none given
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def verify(
    path: str | Path, sources: Sequence[str | Path] = (), *, progress: Progress = silent
) -> Verification:
    """Check a merged file against its record and, where given, recompute it from its clients."""
    path = Path(path)
    checkpoint = open_checkpoint(path)
    record = record_from_json(read_record(path), source=path.name)
    differences = [
        *_tensor_differences(checkpoint, record),
        *_shape_differences(checkpoint, record),
        *_assignment_differences(record),
    ]
    if sources and not differences:
        differences += _client_differences(record, expand_paths(sources), progress)
    recomputed = len(record.sources) if sources else 0
    return Verification(len(record.tensors), recomputed, tuple(differences))


def _tensor_differences(checkpoint: Checkpoint, record: MergeRecord) -> Iterator[str]:
    """Compare the tensors' hashes."""
    written = {checkpoint.output_name(name): name for name in checkpoint.tensors}
    for name in record.tensors.keys() - written.keys():
        yield f"tensor '{name}' of the record is not in the file"
    for name, own_name in written.items():
        if name not in record.tensors:
            yield f"tensor '{name}' of the file is not in the record"
        elif checkpoint.tensor_digest(own_name) != record.tensors[name]:
            yield f"tensor '{name}' differs from its recorded SHA-256"


def _shape_differences(checkpoint: Checkpoint, record: MergeRecord) -> Iterator[str]:
    """Compare the widths that the tensors' shapes give with the recorded ones."""
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    try:
        widths = solve_widths(record.plan, shapes, source=checkpoint.name)
    except FedmergeError as error:
        yield error.problem
        return
    for group, width in record.widths.items():
        if widths.get(group) != width:
            yield f"group '{group}' is {widths.get(group)} wide in the file, {width} in the record"


def _assignment_differences(record: MergeRecord) -> Iterator[str]:
    """Check that assignments are injective, in range, and together cover every global unit."""
    names = [source.name for source in record.sources]
    if set(record.assignments) != set(names):
        yield "the record's assignments and sources name different clients"
        return
    for group in (group.name for group in record.plan.groups):
        if group not in record.widths:
            yield f"group '{group}' has no recorded width"
            continue
        matched = record.widths[group] - record.padding[group]
        covered: set[int] = set()
        for name in names:
            units = record.assignments[name].get(group, np.empty(0, dtype=np.int64)).tolist()
            where = f"{name}'s assignment of group '{group}'"
            if not units:
                yield f"{where} is missing"
            if len(set(units)) < len(units):
                yield f"{where} gives two units the same global unit"
            if not all(0 <= unit < matched for unit in units):
                yield f"{where} leaves the range of 0 to {matched - 1}"
            covered |= set(units)
        if missing := set(range(matched)) - covered:
            yield f"global unit {min(missing)} of group '{group}' belongs to no client"


def _client_differences(
    record: MergeRecord, sources: Sequence[Path], progress: Progress
) -> list[str]:
    """Recompute every global tensor from the clients and compare the hashes."""
    clients = {client.sha256(): client for client in open_clients(sources, record.options.reading)}
    expected = [source.sha256 for source in record.sources]
    differences = [
        f"{client.path.name if client.path else client.name} is none of the recorded clients"
        for digest, client in clients.items()
        if digest not in expected
    ]
    differences += [
        f"client {source.name} ({source.file}) is not among the given files"
        for source in record.sources
        if source.sha256 not in clients
    ]
    if differences:
        return differences
    return list(_recomputed_differences(record, clients, progress))


def _recomputed_differences(
    record: MergeRecord, clients: Mapping[str, Checkpoint], progress: Progress
) -> Iterator[str]:
    merge = _replay(record, [clients[source.sha256] for source in record.sources])
    for number, (name, info) in enumerate(merge.tensors.items()):
        progress("recomputing", number, len(merge.tensors))
        written = merge.clients[0].output_name(name)
        if array_digest(merge.read(name), info.dtype) != record.tensors[written]:
            yield f"tensor '{written}' is not what its clients and assignments give"


def _replay(record: MergeRecord, clients: Sequence[Checkpoint]) -> Merge:
    """Return the merge that the record describes, on the given clients."""
    prepared = prepare(clients, record.options, plan=record.plan)
    dials = dials_for(record.options, prepared.plan)
    named = [
        client.renamed(source.name) for client, source in zip(clients, record.sources, strict=True)
    ]
    return Merge(
        clients=named,
        aligned=prepared.aligned,
        plan=prepared.plan,
        options=record.options,
        dials=dials,
        client_widths=prepared.client_widths,
        widths=record.widths,
        placements=[
            {g: Assignment(i, record.widths[g]) for g, i in record.assignments[source.name].items()}
            for source in record.sources
        ],
        averaging=averaging_for(record.options, dials, prepared.plan, named),
        groups=(),
        width_limit=None,
        warnings=(),
    )
