"""The state between rounds: as a file says it, and read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from fedmerge.decoding import Fail
from fedmerge.federated.federation import Decided, Federation, LocalModel, Round
from fedmerge.federated.preparation import Run
from fedmerge.federated.work_dir import (
    digest_of,
)
from fedmerge.merging.record_schema import WHY_MISSING, GroupEntry, RoundEntry
from fedmerge.values.arrays import Array
from fedmerge.values.plans import Assignment, Widths, axis_size
from fedmerge.values.work import Arrays

ROUNDING = 1e-9  # of what all clients count together


_FIXED = "fixed"


@dataclass(frozen=True)
class SavedState:
    """A run after some of its rounds."""

    federation: Federation
    rounds: tuple[RoundEntry, ...]


class PlacedUnits(msgspec.Struct, frozen=True):
    """Where a client's units of a group went, as a file says it."""

    width: int
    indices: tuple[int, ...]


class StateFile(msgspec.Struct, frozen=True):
    """What a state says beside its tensors."""

    run: str  # digest of all that the result depends on
    clients: tuple[str, ...]
    placements: tuple[dict[str, PlacedUnits], ...]  # per client, by group
    groups: tuple[GroupEntry, ...]
    rounds: tuple[RoundEntry, ...]


def state_to_file(run: Run, state: SavedState) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the tensors of a state by their names in a file, and what is said beside them."""
    federation = state.federation
    arrays = {f"{_FIXED}/{name}": array for name, array in federation.fixed.items()}
    for number, model in enumerate(federation.locals):
        arrays |= {f"{number}/{name}": array for name, array in model.arrays.items()}
    about = {
        "run": digest_of(run.identity),
        "clients": [model.name for model in federation.locals],
        "placements": [
            {group: {"width": a.width, "indices": a.indices.tolist()} for group, a in own.items()}
            for own in federation.placements
        ],
        "groups": [group.to_json() for group in federation.groups],
        "rounds": [asdict(entry) for entry in state.rounds],
    }
    return arrays, about


def state_from_file(file: StateFile, arrays: Arrays, run: Run, *, fail: Fail) -> SavedState:
    """Return the state that a file holds if it can be one of this run, else raise `fail`'s error.

    The run says which rounds, groups and tensors there must be, and how large they are.
    """
    try:
        _check_run(file, run)
        decided = run.method.decided(len(file.rounds))
        start = run.method.start()
        own = [run.method.client_widths(start, k) for k in range(len(run.clients))]
        placements = _placements(file, decided, own)
        _check_groups(file, decided, own, placements[0])
        _check_rounds(file, run, placements[0])
        federation = _federation(file, arrays, run, decided, placements)
        _check_shapes(federation, run, own)
    except ValueError as error:
        raise fail(str(error)) from error
    return SavedState(federation, file.rounds)


def _check_run(file: StateFile, run: Run) -> None:
    _require(file.run == digest_of(run.identity), "it is the state of another run")
    _require(file.clients == run.clients, "its clients are others")
    done, rounds = len(file.rounds), len(run.method.rounds)
    _require(0 < done <= rounds, f"it has {done} rounds of {rounds}")


def _placements(
    file: StateFile, decided: Decided, own: Sequence[Widths]
) -> list[dict[str, Assignment]]:
    """Return where every client's units went: each to a place of its own, in the same layout."""
    _require(len(file.placements) == len(own), "it places the units of other clients")
    for placed, widths in zip(file.placements, own, strict=True):
        _require(tuple(placed) == decided.groups, "it places the units of other groups")
        for group, units in placed.items():
            width, indices = units.width, units.indices
            most = sum(each[group] for each in own)
            is_right = width == file.placements[0][group].width and 0 < width <= most
            _require(is_right, f"it gives group '{group}' {width:,} units")
            _require(
                len(set(indices)) == len(indices) == widths[group]
                and 0 <= min(indices, default=0) <= max(indices, default=0) < width,
                f"its places of the units of group '{group}' are not one for each",
            )
    return [
        {g: Assignment(np.array(p.indices, np.int64), p.width) for g, p in placed.items()}
        for placed in file.placements
    ]


def _check_groups(
    file: StateFile, decided: Decided, own: Sequence[Widths], placed: Mapping[str, Assignment]
) -> None:
    _require(tuple(entry.name for entry in file.groups) == decided.groups, "its groups are others")
    for entry in file.groups:
        widths = tuple(each[entry.name] for each in own)
        sizes = tuple(map(len, entry.similarities))
        _require(
            (entry.client_widths, entry.width, entry.padding)
            == (widths, placed[entry.name].width, 0)
            and sizes in ((), widths)
            and 0 <= entry.match_rate <= 1,
            f"what it says of group '{entry.name}' contradicts the run",
        )


def _check_rounds(file: StateFile, run: Run, placed: Mapping[str, Assignment]) -> None:
    for entry, planned in zip(file.rounds, run.method.rounds, strict=False):
        _require(
            _is_of(entry, planned, set(run.clients)),
            f"what it says of round {planned.number} contradicts the run",
        )
    weighed = run.clients if run.method.start().weights else ()
    weights = file.rounds[-1].client_weights
    _require(
        tuple(weights) == weighed
        and (not weighed or abs(sum(weights.values()) - 1) < ROUNDING)
        and min(weights.values(), default=0) >= 0,
        "what its clients count contradicts the run",
    )
    widths = {group: assignment.width for group, assignment in placed.items()}
    _require(dict(file.rounds[-1].widths) == widths, "its last round had other widths")


def _is_of(entry: RoundEntry, planned: Round, clients: set[str]) -> bool:
    """Whether an entry can tell of a planned round."""
    found = (entry.number, entry.pass_number, entry.layer, entry.stage, entry.epochs)
    layer = planned.layer.label
    expected = (planned.number, planned.pass_number, layer, planned.stage, planned.epochs)
    heard = [*entry.losses, *entry.missing]
    is_trained = bool(entry.losses) and sorted(heard) == sorted(clients)
    return (
        found == expected
        and (is_trained if planned.epochs else not heard)
        and set(entry.missing.values()) <= set(WHY_MISSING)
        and min(entry.bytes_up, entry.bytes_down) >= 0
    )


def _federation(
    file: StateFile,
    arrays: Arrays,
    run: Run,
    decided: Decided,
    placements: Sequence[Mapping[str, Assignment]],
) -> Federation:
    """Return the models, if every tensor is there and no other."""
    method = run.method
    fixed = [*method.kept, *decided.tensors]
    names = {f"{_FIXED}/{name}": name for name in fixed}
    left = [[n for n in model.arrays if n not in set(fixed)] for model in method.initial]
    for number, own in enumerate(left):
        names |= {f"{number}/{name}": name for name in own}
    if names.keys() != arrays.keys():
        other = min(names.keys() ^ arrays.keys())
        raise ValueError(f"'{other}' is {'missing' if other in names else 'none of its tensors'}")
    models = tuple(
        LocalModel(client, {name: arrays[f"{number}/{name}"] for name in left[number]})
        for number, client in enumerate(file.clients)
    )
    decisions = {name: arrays[f"{_FIXED}/{name}"] for name in fixed}
    weights = tuple(file.rounds[-1].client_weights.values())
    return Federation(models, decisions, tuple(placements), file.groups, weights)


def _check_shapes(federation: Federation, run: Run, own: Sequence[Widths]) -> None:
    """Refuse tensors whose sizes contradict the widths, or that are of another type."""
    _check_model(federation.fixed, run, 0, {**own[0], **federation.widths})
    for number, model in enumerate(federation.locals):
        _check_model(model.arrays, run, number, {**own[number], **federation.widths})


def _check_model(arrays: Arrays, run: Run, number: int, widths: Widths) -> None:
    plan, initial = run.session.plan, run.method.initial
    for name, array in arrays.items():
        planned = plan.tensors.get(name)
        shape = initial[number].arrays[name].shape
        if planned is not None:
            shape = tuple(axis_size(layout, widths) for layout in planned.axes)
        dtypes = {model.arrays[name].dtype for model in initial}
        dtypes.add(run.trainer.names.dtypes[name])  # once it was trained
        _require(
            array.shape == shape and array.dtype in dtypes,
            f"'{name}' is {array.shape} of {array.dtype}, expected {shape} of "
            f"{' or '.join(sorted(map(str, dtypes)))}",
        )


def _require(is_right: bool, reason: str) -> None:
    if not is_right:
        raise ValueError(reason)
