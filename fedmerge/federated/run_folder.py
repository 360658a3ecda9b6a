"""The folder of a run: its state between rounds, and whose it is; compared, resumed."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedmerge.checkpoint import LockFile
from fedmerge.decoding import Fail, decode_json
from fedmerge.errors import UsageError
from fedmerge.federated.preparation import Run
from fedmerge.federated.state import SavedState, StateFile, state_from_file, state_to_file
from fedmerge.federated.work_dir import (
    KEPT_FILES,
    damaged_file,
    read_sealed,
    read_sealed_text,
    write_sealed,
    write_sealed_text,
)
from fedmerge.merging.record_schema import ShardEntry
from fedmerge.values.wording import listed

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
