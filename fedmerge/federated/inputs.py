"""What rounds are given: clients, shards, evaluation data, and a trial of the model on them."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedmerge.architecture.model_code import ModelCode
from fedmerge.checkpoint import (
    Checkpoint,
    client_names,
    from_state_dict,
    open_checkpoint,
    read_record,
    to_torch,
)
from fedmerge.errors import CheckpointError, UsageError
from fedmerge.federated.fedma import local_arrays
from fedmerge.federated.options import RetrainOptions, Running
from fedmerge.merging.client_sources import Source, expand_sources, open_clients
from fedmerge.merging.loading import load_checkpoint
from fedmerge.merging.merge_record import consistent_record
from fedmerge.training import (
    LearningTask,
    Shard,
    count_classes,
    find_task,
    pair_shards,
    read_shard,
    try_model,
)
from fedmerge.training.samples import Data, is_named
from fedmerge.training.shards import natural_order, shard_of
from fedmerge.user_code import (
    derived_seed,
    handing_over,
    is_handed_over,
    is_reference,
    seeded,
    state_of,
)
from fedmerge.values.arrays import Array, IntArray
from fedmerge.values.plans import Assignment, Plan

SHARD_SUFFIXES = (".npz", ".pt", ".pth", ".safetensors")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class RoundInputs:
    """A model, shards and evaluation data as engines know them: files and references."""

    model: ModelCode
    shards: list[str | Path]
    names: list[str] | None  # of the clients, where shards tell them
    data: str | None

    @property
    def files(self) -> list[Path]:
        """Every file of shards and data, or reference in place of one."""
        data = [] if self.data is None else [Path(self.data)]
        return [*map(Path, expand_shards(self.shards)), *data]


@contextmanager
def rounds_on_objects(
    model: ModelCode, shards: Any, data: Data | None, running: Running
) -> Iterator[RoundInputs]:
    """Give objects references for the time of a run; only this process can follow them."""
    with handing_over() as hand_over:
        is_object = {
            "model": not isinstance(model.factory, str),
            "shards": isinstance(shards, Mapping),
        }
        for argument, is_it in is_object.items():
            if is_it and running.engine != "local":
                raise UsageError(
                    f"`{argument}` is an object of this process, which the engine "
                    f"{running.engine} can't hand to others",
                    "give it as a file or a reference such as file.py:name, or use engine local",
                )
        if is_object["model"]:
            model = replace(model, factory=hand_over(model.build))
        names = None
        if isinstance(shards, Mapping):
            names = [str(name) for name in shards]
            listed: list[str | Path] = [hand_over(_by_name(shards))]
        elif isinstance(shards, str | Path):
            listed = [shards]
        elif isinstance(shards, list | tuple) and all(map(is_named, shards)):
            listed = list(shards)
        else:
            raise UsageError(
                f"`shards` is {type(shards).__name__}, expected paths, or data by client's name",
                'e.g. shards={"a": (x, y), "b": dataset}',
            )
        evaluation = None if data is None else str(data)
        if data is not None and not is_named(data):
            evaluation = hand_over(_always(shard_of(data, "data")))
        yield RoundInputs(model, listed, names, evaluation)


def _by_name(shards: Mapping[str, Data]) -> Callable[[str], tuple[Array, Array]]:
    """Return a function that gives a client's samples and targets; each is read once."""
    known: dict[str, Shard] = {}

    def load(client: str) -> tuple[Array, Array]:
        if client not in shards:
            raise UsageError(f"`shards` has no data of client '{client}'")
        if client not in known:
            known[client] = shard_of(shards[client], f"shards['{client}']", client=client)
        return _arrays(known[client])

    return load


def _always(shard: Shard) -> Callable[[str], tuple[Array, Array]]:
    return lambda client: _arrays(shard)


def _arrays(shard: Shard) -> tuple[Array, Array]:
    return shard.x[:], shard.y


@dataclass(frozen=True)
class ShardEntry:
    """One client's data: where it is, and what the server may know of it."""

    client: str
    source: str  # a file, or the user's function by reference
    samples: int
    class_counts: tuple[int, ...] | None
    sha256: str  # of the file; of a function's reference

    def to_json(self) -> dict[str, Any]:
        """Return what the record says of it: no folders."""
        is_file = not is_reference(self.source)
        file = Path(self.source).name if is_file else self.source
        counts = None if self.class_counts is None else list(self.class_counts)
        return {
            "client": self.client,
            "file": file,
            "sha256": self.sha256,
            "samples": self.samples,
            "class_counts": counts,
        }


@dataclass(frozen=True)
class Start:
    """The clients' models before the first round."""

    clients: Sequence[Checkpoint]
    is_trained: bool  # the first exchange needs no training before it
    is_initial: bool  # nobody trained them yet
    plan: Plan | None = None  # known from a record
    continued: str | None = None  # SHA-256 of the merged file that they were cut out of


def open_start(
    sources: Sequence[Source],
    shards: Sequence[str],
    model: ModelCode,
    options: RetrainOptions,
    names: Sequence[str] | None = None,
) -> Start:
    """Return the given checkpoints; the clients of one merged file; or freshly built models."""
    if not sources:
        return _initial_clients(names or _names_of(shards), model, options)
    expanded = expand_sources(sources, least=1)
    if len(expanded) == 1 and isinstance(expanded[0], Path):
        return _continued(expanded[0], options)
    clients = open_clients(expand_sources(sources), options.matching.reading, names)
    return Start(clients, is_trained=True, is_initial=False)


def _names_of(shards: Sequence[str]) -> list[str]:
    """Return the names that shards give their clients."""
    if any(map(is_reference, shards)):
        raise UsageError(
            "shards from a function say nothing about the clients' names",
            "give checkpoints whose names the function is called with",
        )
    return client_names([Path(shard) for shard in shards])


def _initial_clients(names: Sequence[str], model: ModelCode, options: RetrainOptions) -> Start:
    """Return one model per shard, as the user's code builds it."""
    if len(names) < 2:
        raise UsageError(f"at least 2 clients are needed, got {len(names)} shards")
    clients = []
    for name in names:
        path = ("shared",) if options.init == "shared" else ("client", name)
        with seeded(derived_seed(options.seed, "init", *path)):
            state = state_of(model.build())
        clients.append(from_state_dict(state, name=name))
    return Start(clients, is_trained=False, is_initial=True)


def _continued(path: Path, options: RetrainOptions) -> Start:
    """Return the clients of a merged file at their own widths, cut out of the global model."""
    try:
        value = read_record(path)
    except CheckpointError as error:
        raise UsageError(
            f"{path}: one client alone, and {error.problem.rpartition(': ')[2]}",
            "give two or more checkpoints, or a file that `match` or `retrain` wrote",
        ) from None
    merged = open_checkpoint(path, options.matching.reading)
    record = consistent_record(value, source=path.name, checkpoint=merged)
    arrays = {name: merged.read(name) for name in merged.tensors}
    widths = {entry.name: entry.width for entry in record.groups}
    clients = []
    for source in record.sources:
        placement = {
            group: Assignment(_in_one_order(indices), widths[group])
            for group, indices in record.assignments[source.name].items()
        }
        own = {**arrays, **local_arrays(arrays, record.plan, placement)}
        clients.append(_in_memory(merged, own, source.name))
    return Start(
        clients,
        is_trained=False,
        is_initial=False,
        plan=record.plan,
        continued=merged.sha256(),
    )


def _in_one_order(indices: IntArray) -> IntArray:
    """Return an assignment; units with own orders in every head take the global one in all."""
    return np.sort(indices, axis=1) if indices.ndim > 1 else indices


def _in_memory(merged: Checkpoint, arrays: Mapping[str, Any], name: str) -> Checkpoint:
    """Return a checkpoint with a merged file's names, ties and dtypes."""
    tensors: dict[str, torch.Tensor] = {}
    for own, info in merged.tensors.items():
        first = merged.aliases.get(own, own)
        tied = tensors.get(merged.output_name(first)) if first != own else None
        tensors[merged.output_name(own)] = (
            to_torch(arrays[own], info.dtype) if tied is None else tied
        )
    return from_state_dict(tensors, name=name)


def expand_shards(arguments: Sequence[str | Path]) -> list[str]:
    """Return one entry per shard: files, those of folders and globs, or a function."""
    shards: list[str] = []
    for argument in map(str, arguments):
        path = Path(argument)
        if is_reference(argument) or path.is_file():
            shards.append(argument)
        elif path.is_dir():
            files = [p for p in path.iterdir() if p.suffix in SHARD_SUFFIXES and p.is_file()]
            shards += map(str, sorted(files, key=natural_order))
        elif found := glob.glob(argument):  # noqa: PTH207 (absolute patterns too)
            shards += sorted(found, key=natural_order)
        else:
            raise UsageError(f"`shards={argument}`: there is no such file or folder")
    if not shards:
        raise UsageError(
            "`shards` names no shard", f"shards end in one of {', '.join(SHARD_SUFFIXES)}"
        )
    return shards


def open_shards(
    names: Sequence[str],
    shards: Sequence[str],
    options: RetrainOptions,
    *,
    look: Callable[[Shard], None],
) -> tuple[list[ShardEntry], str]:
    """Return every client's shard, each read and shown to `look` once, and how they were paired."""
    if len(shards) == 1 and is_reference(shards[0]):
        pairs, why = dict.fromkeys(names, shards[0]), f"shards come from {shards[0]}"
    else:
        pairing = pair_shards(names, [Path(shard) for shard in shards])
        pairs, why = {name: str(path) for name, path in pairing.shards.items()}, pairing.why
    entries = []
    for name in names:
        shard = read_shard(pairs[name], client=name, preparation=options.preparation)
        look(shard)
        entries.append(_shard_entry(shard, pairs[name], options.task))
    return entries, why


def _shard_entry(shard: Shard, source: str, task: str) -> ShardEntry:
    counts = count_classes(find_task(task), shard.targets)
    return ShardEntry(
        shard.name,
        source,
        len(shard),
        None if counts is None else tuple(counts.tolist()),
        shard.sha256() if is_handed_over(source) else source_digest(source),
    )


def source_digest(source: str) -> str:
    """Return the SHA-256 of a file's bytes, or of a reference's text."""
    content = hashlib.sha256()
    if is_reference(source):
        content.update(source.encode())
        return content.hexdigest()
    with Path(source).open("rb") as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()


def output_class_counts(
    entries: Sequence[ShardEntry], outputs: set[int]
) -> dict[str, list[int]] | str:
    """Return every client's count per output, or why there is none."""
    if not outputs:
        return "its outputs are made by no tensor of their own, but by tied weights"
    if len(outputs) > 1:
        return "there are outputs of several sizes"
    [size] = outputs
    counts: dict[str, list[int]] = {}
    for entry in entries:
        if entry.class_counts is None:
            return "the task counts no classes; if there are any, give `class_counts`"
        if len(entry.class_counts) > size:
            found = f"{entry.client} has {len(entry.class_counts)} classes"
            return f"{found}, but there are {size} outputs; give `class_counts`"
        counts[entry.client] = [*entry.class_counts, *[0] * (size - len(entry.class_counts))]
    return counts


@dataclass(frozen=True)
class Trial:
    """One client's model, which stands for all: hidden widths change nothing of what fits."""

    model: nn.Module
    task: LearningTask
    seed: int
    device: str

    def train_on(self, shard: Shard) -> None:
        """Refuse samples on which a client could not train."""
        self._try(shard, training=True)

    def evaluate_on(self, shard: Shard) -> None:
        """Refuse samples on which global models could not be evaluated."""
        self._try(shard, training=False)

    def _try(self, shard: Shard, *, training: bool) -> None:
        with seeded(self.seed, self.device):
            try_model(self.model, shard, self.task, training=training, device=self.device)


def prepare_trial(
    code: ModelCode, client: Checkpoint, task: str, *, seed: int, device: str
) -> Trial:
    """Return the trial of a client's model, which must be one that can be trained."""
    with seeded(seed, device):
        built = code.build()
        if isinstance(built, torch.jit.ScriptModule | torch.fx.GraphModule):
            raise UsageError(
                f"`model={code.factory}` is an exported model, which can't be trained here",
                "give the code that builds it: file.py:name",
            )
        return Trial(load_checkpoint(lambda: built, client), find_task(task), seed, device)
