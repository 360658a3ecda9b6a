"""`verify`: a merged file against its record, and against the clients it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fedmerge.checkpoint import (
    Checkpoint,
    expand_paths,
    open_checkpoint,
    read_record,
    values_digest,
)
from fedmerge.errors import ArchitectureError, FedmergeError, UsageError
from fedmerge.merging.client_sources import open_base, open_clients
from fedmerge.merging.merge_record import (
    MergeRecord,
    assignment_differences,
    record_from_json,
    shape_differences,
)
from fedmerge.merging.result import Merge, decide
from fedmerge.merging.session import Session, prepare
from fedmerge.values.wording import Progress, silent

if TYPE_CHECKING:
    from fedmerge.architecture.model_code import ModelCode


_Compare: TypeAlias = Callable[[MergeRecord, Mapping[str, Checkpoint], Progress], Iterator[str]]
MOST_DIFFERENCES = 1000  # that are told
MOST_TWINS = 100  # clients that are one file, in the mean: each is a client to recompute


@dataclass(frozen=True)
class Verification:
    """What was checked, and every difference that was found."""

    tensors: int
    recomputed: int  # how many clients the global tensors were recomputed from; 0: none given
    differences: tuple[str, ...]
    is_trained: bool = field(default=False, repr=False)  # its tensors don't follow from clients
    fitted: int = 0  # tensors that don't either, because they depend on probes or couplings
    is_program: bool = field(default=False, repr=False)  # an ensemble's, as branches
    is_adapter: bool = field(default=False, repr=False)  # its updates are a mean of clients'

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def verify(
    path: str | Path,
    sources: Sequence[str | Path] = (),
    *,
    model: ModelCode | None = None,
    base: str | Path | None = None,
    allow_global: Sequence[str] = (),
    progress: Progress = silent,
) -> Verification:
    """Check a merged file against its record and, where given, recompute it from its clients.

    With the model's code, every client must give the same outputs in the global layout as before.
    `base` is the model that a merge of changes goes back to. `allow_global` are classes that the
    clients' files may name: a record never says so.
    """
    path = Path(path)
    checkpoint = open_checkpoint(path)
    record = record_from_json(read_record(path), source=path.name)
    layout = (shape_differences(checkpoint, record), assignment_differences(record))
    differences = _first(
        _tensor_differences(checkpoint, record), *(() if record.is_program else layout)
    )
    recompute = bool(sources) and not differences
    if recompute:
        clients = open_recorded(record, expand_paths(sources), allow_global)
        opened = _recorded_base(record, base, allow_global)
        compare: _Compare = partial(_recomputed_differences, opened)
        if record.is_program:
            compare = partial(_program_differences, checkpoint, model)
        differences += _client_differences(record, clients, progress, compare)
        if model is not None and not record.is_program and not differences:
            differences += _output_differences(record, clients, model, opened)
    recomputed = recompute and not differences and not record.is_trained
    clients_used = len(record.sources) if recomputed else 0
    return Verification(
        tensors=len(record.tensors),
        recomputed=clients_used,
        differences=tuple(differences),
        is_trained=record.is_trained,
        fitted=len(record.fitted),
        is_program=record.is_program,
    )


def _first(*found: Iterator[str]) -> list[str]:
    """Return differences, of very many the first and that there are more."""
    shown = list(islice(chain(*found), MOST_DIFFERENCES + 1))
    return shown if len(shown) <= MOST_DIFFERENCES else [*shown[:-1], "and more"]


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


def open_recorded(
    record: MergeRecord, sources: Sequence[Path], allow_global: Sequence[str]
) -> dict[str, Checkpoint]:
    """Return the given clients by their hashes; the record says how to read, not whom to trust."""
    trusted = replace(record.options, allow_global=tuple(allow_global))
    clients = open_clients(sources, trusted.reading)
    return {client.sha256(): client for client in clients}


def _program_differences(
    checkpoint: Checkpoint,
    model: ModelCode | None,
    record: MergeRecord,
    clients: Mapping[str, Checkpoint],
    progress: Progress,
) -> Iterator[str]:
    """Compare an ensemble's program with its clients; run it where they can be run."""
    from fedmerge.merging.ensemble_program import client_differences, output_differences

    session = replace(prepare_recorded(record, clients), model=model)
    progress("comparing", 0, 1)
    found = list(client_differences(checkpoint, record, session))
    yield from found
    if session.can_run and not found:
        yield from output_differences(checkpoint, session)


def _client_differences(
    record: MergeRecord,
    clients: Mapping[str, Checkpoint],
    progress: Progress,
    compare: _Compare,
) -> list[str]:
    """Recompute every global tensor from the clients and compare the hashes."""
    try:
        differences = list(_source_differences(record, clients))
        return differences or _first(compare(record, clients, progress))
    except FedmergeError as error:
        return [f"the clients do not fit the record: {error.problem}"]


def _output_differences(
    record: MergeRecord,
    clients: Mapping[str, Checkpoint],
    model: ModelCode,
    base: Checkpoint | None,
) -> list[str]:
    from fedmerge.merging.output_differences import output_differences

    session = prepare_recorded(record, clients, base)
    return list(output_differences(replay_recorded(record, session), model))


def _recorded_base(
    record: MergeRecord, path: str | Path | None, allow_global: Sequence[str]
) -> Checkpoint | None:
    """Return the recorded base by its hash; only a merge of changes can't be recomputed without."""
    if record.base is None:
        if path is not None:
            raise UsageError("`base`: the merge was made without a base model")
        return None
    if path is None and record.options.scale is None:
        return None
    if path is None:
        raise UsageError(
            f"the merge is of what its clients changed of {record.base.name}",
            f"give the base model ({record.base.file or record.base.name}) with `base`",
        )
    trusted = replace(record.options, allow_global=tuple(allow_global))
    found = open_base(path, trusted.reading).renamed(record.base.name)
    if found.sha256() != record.base.sha256:
        raise UsageError(
            f"`base`: {path} is not the recorded base model {record.base.name}",
            "give the file that `match` was given",
        )
    return found


def prepare_recorded(
    record: MergeRecord, clients: Mapping[str, Checkpoint], base: Checkpoint | None = None
) -> Session:
    """Return the recorded clients, planned as recorded; without a base, as if to be averaged."""
    ordered = [clients[source.sha256].renamed(source.name) for source in record.sources]
    options = record.options if base is not None else replace(record.options, scale=None)
    return prepare(ordered, options, plan=record.plan, base=base)


def replay_recorded(record: MergeRecord, session: Session) -> Merge:
    """Return the recorded merge of a session; refuse it if their widths are others."""
    for entry in record.groups:
        own = tuple(widths.get(entry.name) for widths in session.client_widths)
        if own != entry.client_widths:
            raise ArchitectureError(
                f"group '{entry.name}' has other widths with the recorded options and clients"
            )
    widths = {entry.name: entry.width for entry in record.groups}
    return decide(session, widths, record.assignments, record.groups, width_limit=None)


def _source_differences(record: MergeRecord, clients: Mapping[str, Checkpoint]) -> Iterator[str]:
    if len(record.sources) > MOST_TWINS * len(clients):
        yield f"the record has {len(record.sources)} clients, given are {len(clients)} files"
        return
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
    base: Checkpoint | None,
    record: MergeRecord,
    clients: Mapping[str, Checkpoint],
    progress: Progress,
) -> Iterator[str]:
    merge = replay_recorded(record, prepare_recorded(record, clients, base))
    if (merge.parameters, merge.growth) != (record.parameters, record.growth):
        yield "the recorded parameters or growth are not those of the recorded widths"
    if record.is_trained:
        return
    written_names = {name: merge.clients[0].output_name(name) for name in merge.tensors}
    if set(written_names.values()) != set(record.tensors):
        yield "the recorded tensors are not those of the clients"
        return
    for number, (name, info) in enumerate(merge.tensors.items()):
        progress("recomputing", number, len(merge.tensors))
        if merge.session.aligned[0].aliases.get(name, name) in record.fitted:
            continue
        written = written_names[name]
        if values_digest(merge.values(name), info.dtype) != record.tensors[written]:
            yield f"tensor '{written}' is not what its clients and assignments give"
