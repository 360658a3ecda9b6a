"""`inspect`: what is in a file, what of it is understood, and how files differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmerge.architecture import ChainOptions, classify, plan_chain
from fedmerge.checkpoint import Checkpoint, ReadOptions, client_names, expand_paths, open_checkpoint
from fedmerge.errors import FedmergeError
from fedmerge.merging.client_sources import first_difference
from fedmerge.merging.session import check_no_adapter
from fedmerge.values.clients import TensorInfo
from fedmerge.values.option_fields import checked
from fedmerge.values.plans import Plan

_SEED = 0  # of the values that a program's graph is checked with


@dataclass(frozen=True)
class GuessedLayer:
    """The tensors under one prefix, and the layer that they look like."""

    prefix: str
    kind: str
    tensors: dict[str, TensorInfo]  # by leaf name


@dataclass(frozen=True)
class Inspection:
    """What one file turned out to be."""

    path: Path
    checkpoint: Checkpoint | None = None
    layers: tuple[GuessedLayer, ...] = ()
    plan: Plan | None = None
    unplanned: FedmergeError | None = None  # why there is no plan from the file alone
    refused: FedmergeError | None = None  # why the file was not opened
    difference: str | None = None  # from the first file that was opened
    members: int = 0  # clients in an ensemble's program


@checked
def inspect(
    arguments: Sequence[str | Path], reading: ReadOptions, chain: ChainOptions
) -> list[Inspection]:
    """Look into every file; a refusal is part of the answer."""
    paths = expand_paths(arguments)
    inspections: list[Inspection] = []
    first: Checkpoint | None = None
    for path, name in zip(paths, client_names(paths), strict=True):
        try:
            checkpoint = open_checkpoint(path, reading, name=name)
        except FedmergeError as error:
            inspections.append(Inspection(path, refused=error))
            continue
        first = first or checkpoint
        inspections.append(_inspect_opened(path, checkpoint, chain, first))
    return inspections


def _inspect_opened(
    path: Path, checkpoint: Checkpoint, chain: ChainOptions, first: Checkpoint
) -> Inspection:
    plan, unplanned = None, None
    try:
        for tensor in checkpoint.tensors:
            if tensor not in checkpoint.aliases:
                checkpoint.read(tensor)  # refuses values that are not finite
        plan = _plan(checkpoint, chain)
    except FedmergeError as error:
        unplanned = error
    return Inspection(
        path=path,
        checkpoint=checkpoint,
        layers=tuple(guess_layers(checkpoint)),
        plan=plan,
        unplanned=unplanned,
        difference=None if checkpoint is first else first_difference(checkpoint, first),
        members=_members(checkpoint),
    )


def _members(checkpoint: Checkpoint) -> int:
    if checkpoint.program is None:
        return 0
    from fedmerge.merging.ensemble_program import member_count  # other files do without

    return member_count(checkpoint)


def _plan(checkpoint: Checkpoint, chain: ChainOptions) -> Plan:
    check_no_adapter(checkpoint)
    if checkpoint.program is not None:
        from fedmerge.architecture.plan_apart import plan_graph  # other files do without

        return plan_graph(checkpoint, seed=_SEED)
    return plan_chain(checkpoint.tensors, chain, aliases=checkpoint.aliases, source=checkpoint.name)


def guess_layers(checkpoint: Checkpoint) -> list[GuessedLayer]:
    """Return the tensors by prefix, each with the kind of layer it looks like."""
    prefixes: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        prefix, _, leaf = name.rpartition(".")
        prefixes.setdefault(prefix, {})[leaf] = info
    return [
        GuessedLayer(prefix, _kind(prefix, leaves), leaves) for prefix, leaves in prefixes.items()
    ]


def _kind(prefix: str, leaves: dict[str, TensorInfo]) -> str:
    floats = {leaf: info for leaf, info in leaves.items() if info.is_float}
    try:
        return classify(prefix, floats) if floats else "buffers"
    except FedmergeError:
        return "unknown"
