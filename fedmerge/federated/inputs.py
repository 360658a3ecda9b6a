"""What rounds are given: clients, where their data are, and evaluation data of the server's."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmerge.architecture.model_code import ModelCode
from fedmerge.architecture.tensor_names import load_checkpoint
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
from fedmerge.merging.merge_record import consistent_record
from fedmerge.training import (
    EVALUATION_KEYS,
    find_task,
    pair_shards,
    read_shard,
    try_model,
)
from fedmerge.training.data_formats import FORMATS, is_one_clients
from fedmerge.training.samples import Data, is_named
from fedmerge.training.shards import EVALUATION, as_returned, natural_order
from fedmerge.user_code import (
    derived_seed,
    find_object,
    handing_over,
    is_reference,
    seeded,
    state_of,
)
from fedmerge.values.arrays import IntArray
from fedmerge.values.plans import Assignment, Plan

SHARD_SUFFIXES = tuple(FORMATS)
CLIENTS = "clients"  # the list beside a function of data
CLIENT = "{client}"  # stands for a client's name in a path that is its own machine's


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
            evaluation = hand_over(_always(as_returned(data, "data")))
        yield RoundInputs(model, listed, names, evaluation)


def _by_name(shards: Mapping[str, Data]) -> Callable[[str], object]:
    """Return a function that gives a client's samples and targets; each is read once."""

    @cache
    def load(client: str) -> object:
        if client not in shards:
            raise UsageError(f"`shards` has no data of client '{client}'")
        return as_returned(shards[client], f"shards['{client}']", client=client)

    return load


def _always(data: object) -> Callable[[str], object]:
    return lambda client: data


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
    *,
    whole: bool = False,
) -> Start:
    """Return the given checkpoints; the clients of one merged file; or freshly built models.

    The clients of a merged file have their own units of it, or begin with the `whole` of it.
    """
    if not sources:
        return _initial_clients(names or _names_of(shards), model, options)
    expanded = expand_sources(sources, least=1)
    if len(expanded) == 1 and isinstance(expanded[0], Path):
        return _continued(expanded[0], options, whole=whole)
    clients = open_clients(expand_sources(sources), options.matching.reading, names)
    return Start(clients, is_trained=True, is_initial=False)


def _in_folder(folder: Path) -> list[Path]:
    """Return the shards in a folder: its files, or else its folders."""
    inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    files = [path for path in inside if path.suffix in SHARD_SUFFIXES and path.is_file()]
    return files or [path for path in inside if path.is_dir() and path.name != "__pycache__"]


def is_anywhere(shard: str) -> bool:
    """Whether a shard says nothing of who is there: a function, or a path with {client} in it."""
    return is_reference(shard) or CLIENT in shard


def _names_of(shards: Sequence[str]) -> list[str]:
    """Return the names that shards give their clients."""
    if any(map(is_anywhere, shards)):
        return _names_beside(shards[0])
    return client_names([Path(shard) for shard in shards])


def _names_beside(shard: str) -> list[str]:
    """Return the list `clients` beside the user's function."""
    named = None
    if is_reference(shard):
        place = shard.rpartition(":")[0]
        with suppress(UsageError):
            named = find_object(f"{place}:{CLIENTS}", what="list of the clients' names")
    if named is None:
        raise UsageError(
            f"shards={shard} says nothing about the clients' names",
            "name them with `client_names=north,south`, by a list `clients` beside the function, "
            "or by checkpoints",
        )
    if not isinstance(named, list | tuple) or not all(isinstance(n, str) and n for n in named):
        raise UsageError(f"'{CLIENTS}' in {shard} is {named!r}, expected a list of names")
    return list(named)


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


def _continued(path: Path, options: RetrainOptions, *, whole: bool) -> Start:
    """Return the clients of a merged file: at their own widths, cut out of it, or all of it."""
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
        if whole:
            clients.append(client_in_memory(merged, arrays, source.name))
            continue
        placement = {
            group: Assignment(_in_one_order(indices), widths[group])
            for group, indices in record.assignments[source.name].items()
        }
        own = {**arrays, **local_arrays(arrays, record.plan, placement)}
        clients.append(client_in_memory(merged, own, source.name))
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


def client_in_memory(merged: Checkpoint, arrays: Mapping[str, Any], name: str) -> Checkpoint:
    """Return a client of these arrays, with another checkpoint's names, ties and dtypes."""
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
        if is_anywhere(argument) or path.is_file() or (path.is_dir() and is_one_clients(path)):
            shards.append(argument)
        elif path.is_dir():
            shards += map(str, sorted(_in_folder(path), key=natural_order))
        elif found := glob.glob(argument):  # noqa: PTH207 (absolute patterns too)
            shards += sorted(found, key=natural_order)
        else:
            raise UsageError(f"`shards={argument}`: there is no such file or folder")
    if not shards:
        raise UsageError(
            "`shards` names no shard", f"shards end in one of {', '.join(SHARD_SUFFIXES)}"
        )
    return shards


def pair_sources(names: Sequence[str], shards: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return where every client's data are, and how they were paired; nothing is opened."""
    if len(shards) == 1 and is_anywhere(shards[0]):
        return {name: shards[0].replace(CLIENT, name) for name in names}, f"shards: {shards[0]}"
    pairing = pair_shards(names, [Path(shard) for shard in shards])
    return {name: str(path) for name, path in pairing.shards.items()}, pairing.why


def check_model(
    code: ModelCode, client: Checkpoint, options: RetrainOptions, *, device: str, data: str | None
) -> None:
    """Refuse a model that can't be trained, or that can't be evaluated on the server's own data.

    One client's model stands for all: hidden widths change nothing of what fits.
    """
    with seeded(options.seed, device):
        built = code.build()
        if isinstance(built, torch.jit.ScriptModule | torch.fx.GraphModule):
            raise UsageError(
                f"`model={code.factory}` is an exported model, which can't be trained here",
                "give the code that builds it: file.py:name",
            )
        model = load_checkpoint(lambda: built, client)
    task = find_task(options.task)
    if data is None:
        return
    shard = read_shard(
        data,
        client=EVALUATION,
        keys=EVALUATION_KEYS,
        preparation=options.preparation,
        reading=options.reading,
    )
    with seeded(options.seed, device):
        try_model(model, shard, task, training=False, device=device)
