"""The state between rounds: saved, compared, resumed."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedmerge.checkpoint import LockFile
from fedmerge.decoding import Fail, decode_json
from fedmerge.errors import UsageError
from fedmerge.federated.federation import Decided, Federation, LocalModel, Round
from fedmerge.federated.preparation import Run
from fedmerge.federated.work_dir import (
    KEPT_FILES,
    damaged_file,
    digest_of,
    read_sealed,
    read_sealed_text,
    write_sealed,
    write_sealed_text,
)
from fedmerge.merging.record_schema import WHY_MISSING, GroupEntry, RoundEntry, ShardEntry
from fedmerge.values.arrays import Array
from fedmerge.values.plans import Assignment, Widths, axis_size
from fedmerge.values.wording import listed
from fedmerge.values.work import Arrays

ROUNDING = 1e-9  # of what all clients count together
MOST_CHANGED = 8  # clients whose files differ that an error names


def first_difference(found: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the first value in which two runs differ, in words."""
    for name in [*saved, *(key for key in found if key not in saved)]:
        one, other = found.get(name), saved.get(name)
        if (name in found) != (name in saved):
            return f"{name} is {'not there' if name in saved else 'new'}"
        if one != other:
            return _DIFFERENCES.get(name, _plain_difference)(name, one, other)
    return None


def _plain_difference(name: str, found: Any, saved: Any) -> str:
    return f"{name} is {json.dumps(found)}, was {json.dumps(saved)}"


def _inner_difference(name: str, found: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    difference = first_difference(found, saved)
    assert difference is not None, f"'{name}' differs"
    return difference


def _files_difference(name: str, found: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return in words how the digests of clients, or of their shards, differ."""
    what = _EACH[name]
    for client in (*found, *saved):
        if (client in found) != (client in saved):
            return f"{client} is {'new' if client in found else 'gone'} among the {what}"
    changed = [client for client in found if found[client] != saved[client]]
    return f"the {what} of {listed(changed, MOST_CHANGED)} are not the same"


def _given_difference(name: str, found: str | None, saved: str | None) -> str:
    """Return in words how one of the files of a run differs."""
    if found is None or saved is None:
        return f"{_FILES[name]} is {'not' if found is None else 'now'} given"
    return f"{_FILES[name]} is another one"


_EACH = {"clients": "models", "shards": "shards"}
_FILES = {"data": "`data`", "continued_from": "the merged file", "sha256": "the code of `model`"}
_DIFFERENCES: Mapping[str, Callable[[str, Any, Any], str]] = {
    "options": _inner_difference,
    "model": _inner_difference,
    "name": lambda name, found, saved: f"`model` is {found}, was {saved}",
    "arguments": lambda name, found, saved: f"`model_arg` is {found}, was {saved}",
    "sha256": _given_difference,
    "probes": lambda name, found, saved: "the inputs of `init=matched` are others",
    "continued_from": _given_difference,
    "clients": _files_difference,
    "shards": _files_difference,
    "data": _given_difference,
    "plan": lambda name, found, saved: "the plan is another one",
}


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


RUN_FILE = "run.json"
STATE_FILE = "state.safetensors"
LOCK_FILE = "run.lock"  # there while a run uses the folder
_OUTPUT = "output"  # of the run file: where the result goes, which it does not depend on
_HIDDEN = ".fedmerge-*.tmp"  # what a killed process may leave


class _CodeFile(msgspec.Struct, frozen=True):
    """The user's model, as the run file says it."""

    name: str
    arguments: dict[str, Any]
    sha256: str | None


class _RunFile(msgspec.Struct, frozen=True):
    """All that the result of a run depends on, and where it goes."""

    fedmerge: str
    options: dict[str, Any]
    model: _CodeFile
    probes: str | None
    continued_from: str | None
    clients: dict[str, str]
    shards: dict[str, ShardEntry]
    data: str | None
    plan: dict[str, Any]
    output: str | None
    sha256: str


def default_work_dir(output: Path) -> Path:
    """Return where a run keeps its state unless it is told."""
    return output.with_name(output.name + ".work")


@dataclass(frozen=True)
class WorkDir:
    """The folder in which a run keeps its state."""

    path: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no other run use the folder meanwhile; it is made, unless it is there."""
        made: list[Path] = []
        try:
            lock = self._lock(made)
            try:
                yield
            finally:
                lock.release()
        finally:
            with suppress(OSError):  # something was written there
                for folder in made:  # the innermost first
                    folder.rmdir()

    def _lock(self, made: list[Path]) -> LockFile:
        """Make the folder, unless it is there, and take its lock; `made` gets what it makes."""
        try:
            if self.path.exists() and not self.path.is_dir():
                problem = f"{self.path}: is a file, expected a folder"
                raise UsageError(problem, "choose a `work_dir`")
            made += [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            lock = LockFile.take(self.path / LOCK_FILE)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(
                f"{self.path}: cannot be written ({reason})", "choose another `work_dir`"
            ) from error
        if lock is None:
            raise UsageError(
                f"{self.path}: another run is using it",
                "wait until it is done, or choose another `work_dir`",
            )
        return lock

    def check_free(self, output: Path | None, *, force: bool) -> None:
        """Refuse a folder in which something is, but for a run that did not finish a round.

        With `force`, a run of the same output makes way, too.
        """
        left = [path for path in self.path.iterdir() if not _is_of_the_start(path)]
        if force and output is not None and self.is_own(output):
            left = [path for path in left if not _is_of_a_run(path)]
        if left:
            raise UsageError(
                f"{self.path}: is not empty",
                f"go on with the run in it with `resume`, or {self._start_again}",
            )

    def clear(self) -> None:
        """Remove the state of a run, and nothing else."""
        for path in self.path.iterdir():
            if _is_of_a_run(path):
                path.unlink()

    @property
    def _start_again(self) -> str:
        return f"start again: remove it ({shlex.join(['rm', '-r', str(self.path)])})"

    def _damaged(self, path: Path) -> Fail:
        return damaged_file(path, self._start_again)

    def is_own(self, output: Path) -> bool:
        """Whether the run in the folder, if there is one, writes to an output."""
        saved = self._saved_run()
        return saved is not None and saved[_OUTPUT] == _place_of(output)

    def begin(self, run: Run, output: Path | None) -> SavedState | None:
        """Return the state of this run, None if there is none; refuse that of another one."""
        saved = self._saved_run()
        difference = None
        if saved is not None:
            own = {name: value for name, value in saved.items() if name != _OUTPUT}
            difference = first_difference(run.identity, own)
        if difference is not None:
            raise UsageError(
                f"{self.path}: holds another run: {difference}",
                "run the same command as before, or choose another `work_dir`",
            )
        state = self.load(run)
        place = None if output is None else _place_of(output)
        write_sealed_text(self.path / RUN_FILE, {**run.identity, _OUTPUT: place})
        return state

    def _saved_run(self) -> dict[str, Any] | None:
        """Return what the run in the folder is, None if there is none that finished a round."""
        path = self.path / RUN_FILE
        if not os.path.lexists(path) or not os.path.lexists(self.path / STATE_FILE):
            return None
        found = read_sealed_text(path, _RunFile, fail=self._damaged(path))
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
        return {name: value for name, value in values.items() if name != "sha256"}

    def known_shards(self) -> dict[str, ShardEntry]:
        """Return what the run in the folder, if there is one, was told of its clients' data."""
        saved = self._saved_run() or {}
        return {n: msgspec.convert(e, ShardEntry) for n, e in saved.get("shards", {}).items()}

    def save(self, run: Run, state: SavedState) -> None:
        """Replace the state by the one after another round."""
        write_sealed(self.path / STATE_FILE, *state_to_file(run, state))

    def load(self, run: Run) -> SavedState | None:
        """Return a run's state after its last complete round, None before the first."""
        path = self.path / STATE_FILE
        if not os.path.lexists(path):
            return None
        for kept in sorted(self.path.glob(KEPT_FILES)):
            read_sealed(kept, fail=self._damaged(kept))
        fail = self._damaged(path)
        found = read_sealed(path, fail=fail)
        file = decode_json(found.about, StateFile, fail=fail)
        return state_from_file(file, found.arrays, run, fail=fail)


@contextmanager
def held_work_dir(path: str | Path | None) -> Iterator[WorkDir | None]:
    """Hold the folder in which a run is to keep its state, if there is one."""
    if path is None:
        yield None
        return
    work_dir = WorkDir(Path(path))
    with work_dir.held():
        yield work_dir


def _place_of(output: Path) -> str:
    return str(output.resolve())


def _is_of_a_run(path: Path) -> bool:
    """Whether a file is the state of a run that finished a round."""
    return path.name in (RUN_FILE, STATE_FILE) or path.match(KEPT_FILES)


def _is_of_the_start(path: Path) -> bool:
    """Whether a file was written before the first round was done."""
    return path.name in (RUN_FILE, LOCK_FILE) or path.match(_HIDDEN)
