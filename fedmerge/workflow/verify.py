"""`verify`: a merged file against its record, and against the clients it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedmerge.checkpoint import (
    Checkpoint,
    array_digest,
    expand_paths,
    open_checkpoint,
    read_record,
)
from fedmerge.errors import FedmergeError
from fedmerge.graph import solve_widths
from fedmerge.types.progress import Progress, silent
from fedmerge.workflow.clients import open_clients
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.prepared import Prepared, decide, prepare
from fedmerge.workflow.record import GroupEntry, MergeRecord, record_from_json

if TYPE_CHECKING:
    from fedmerge.workflow.models import ModelCode


@dataclass(frozen=True)
class Verification:
    """What was checked, and every difference that was found."""

    tensors: int
    recomputed: int  # how many clients the global tensors were recomputed from; 0: none given
    differences: tuple[str, ...]
    is_trained: bool = field(default=False, repr=False)  # its tensors don't follow from clients
    fitted: int = 0  # tensors that don't either, because they depend on the probes

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def verify(
    path: str | Path,
    sources: Sequence[str | Path] = (),
    *,
    model: ModelCode | None = None,
    progress: Progress = silent,
) -> Verification:
    """Check a merged file against its record and, where given, recompute it from its clients.

    With the model's code, every client must give the same outputs in the global layout as before.
    """
    path = Path(path)
    checkpoint = open_checkpoint(path)
    record = record_from_json(read_record(path), source=path.name)
    differences = [
        *_tensor_differences(checkpoint, record),
        *_shape_differences(checkpoint, record),
        *_assignment_differences(record),
    ]
    recompute = bool(sources) and not differences
    if recompute:
        clients = open_recorded(record, expand_paths(sources))
        differences += _client_differences(record, clients, progress)
        if model is not None and not differences:
            differences += _output_differences(record, clients, model)
    recomputed = recompute and not differences and not record.is_trained
    clients_used = len(record.sources) if recomputed else 0
    return Verification(
        tensors=len(record.tensors),
        recomputed=clients_used,
        differences=tuple(differences),
        is_trained=record.is_trained,
        fitted=len(record.fitted),
    )


def _tensor_differences(checkpoint: Checkpoint, record: MergeRecord) -> Iterator[str]:
    """Compare the tensors' hashes."""
    written = {checkpoint.output_name(name): name for name in checkpoint.tensors}
    for name in (name for name in record.tensors if name not in written):
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
    for entry in record.groups:
        if widths.get(entry.name) != entry.width:
            found = widths.get(entry.name)
            yield f"group '{entry.name}' is {found} wide in the file, {entry.width} in the record"


def _assignment_differences(record: MergeRecord) -> Iterator[str]:
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
    for entry in record.groups:
        yield from _group_differences(record, entry, names)


def _group_differences(
    record: MergeRecord, entry: GroupEntry, names: Sequence[str]
) -> Iterator[str]:
    matched = entry.width - entry.padding
    covered: set[int] = set()
    for name, width in zip(names, entry.client_widths, strict=False):
        units = record.assignments[name][entry.name].tolist()
        where = f"{name}'s assignment of group '{entry.name}'"
        if len(units) != width:
            yield f"{where} has {len(units)} units, its recorded width is {width}"
        if len(set(units)) < len(units):
            yield f"{where} gives two units the same global unit"
        if not all(0 <= unit < matched for unit in units):
            yield f"{where} leaves the range of 0 to {matched - 1}"
        covered |= set(units)
    if len(entry.client_widths) != len(names):
        yield f"group '{entry.name}' has {len(entry.client_widths)} recorded widths"
    if missing := set(range(matched)) - covered:
        yield f"global unit {min(missing)} of group '{entry.name}' belongs to no client"


def open_recorded(record: MergeRecord, sources: Sequence[Path]) -> dict[str, Checkpoint]:
    """Return the given clients by their hashes."""
    clients = open_clients(sources, record.options.reading)
    return {client.sha256(): client for client in clients}


def _client_differences(
    record: MergeRecord, clients: Mapping[str, Checkpoint], progress: Progress
) -> list[str]:
    """Recompute every global tensor from the clients and compare the hashes."""
    try:
        differences = list(_source_differences(record, clients))
        return differences or list(_recomputed_differences(record, clients, progress))
    except FedmergeError as error:
        return [f"the clients do not fit the record: {error.problem}"]


def _output_differences(
    record: MergeRecord, clients: Mapping[str, Checkpoint], model: ModelCode
) -> list[str]:
    from fedmerge.workflow.outputs import output_differences

    return list(
        output_differences(replay_recorded(record, prepare_recorded(record, clients)), model)
    )


def prepare_recorded(record: MergeRecord, clients: Mapping[str, Checkpoint]) -> Prepared:
    """Return the recorded clients, planned as recorded."""
    ordered = [clients[source.sha256].renamed(source.name) for source in record.sources]
    return prepare(ordered, record.options, plan=record.plan)


def replay_recorded(record: MergeRecord, prepared: Prepared) -> Merge:
    """Return the recorded merge of prepared clients."""
    widths = {entry.name: entry.width for entry in record.groups}
    return decide(
        prepared, record.options, widths, record.assignments, record.groups, width_limit=None
    )


def _source_differences(record: MergeRecord, clients: Mapping[str, Checkpoint]) -> Iterator[str]:
    expected = {source.sha256 for source in record.sources}
    for digest, client in clients.items():
        if digest not in expected:
            file = client.path.name if client.path else client.name
            yield f"{file} is none of the recorded clients"
    for source in record.sources:
        if source.sha256 not in clients:
            yield f"client {source.name} ({source.file}) is not among the given files"
        elif (size := clients[source.sha256].size) != source.size:
            yield f"client {source.name} has {size} bytes, {source.size} are recorded"


def _recomputed_differences(
    record: MergeRecord, clients: Mapping[str, Checkpoint], progress: Progress
) -> Iterator[str]:
    prepared = prepare_recorded(record, clients)
    for entry in record.groups:
        own = tuple(widths.get(entry.name) for widths in prepared.client_widths)
        if own != entry.client_widths:
            yield f"group '{entry.name}' has other widths with the recorded options and clients"
            return
    merge = replay_recorded(record, prepared)
    if (merge.parameters(merge.widths), merge.growth) != (record.parameters, record.growth):
        yield "the recorded parameters or growth are not those of the recorded widths"
    if record.is_trained:
        return
    for number, (name, info) in enumerate(merge.tensors.items()):
        progress("recomputing", number, len(merge.tensors))
        if merge.aligned[0].aliases.get(name, name) in record.fitted:
            continue
        written = merge.clients[0].output_name(name)
        if array_digest(merge.read(name), info.dtype) != record.tensors[written]:
            yield f"tensor '{written}' is not what its clients and assignments give"
