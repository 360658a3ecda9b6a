"""The state of a run on disk: after every round, whole or not at all, and as it was written."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedmerge.checkpoint import LockFile
from fedmerge.decoding import Fail, decode_json
from fedmerge.errors import UsageError
from fedmerge.workflow.retrain.differences import first_difference
from fedmerge.workflow.retrain.kept import KEPT_FILES
from fedmerge.workflow.retrain.prepare import Run
from fedmerge.workflow.retrain.saved import (
    SavedState,
    StateFile,
    state_from_file,
    state_to_file,
)
from fedmerge.workflow.retrain.sealed import (
    damaged_file,
    read_sealed,
    read_sealed_text,
    write_sealed,
    write_sealed_text,
)

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
    continued_from: str | None
    clients: dict[str, str]
    shards: dict[str, str]
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
        try:
            made = self._made()
            lock = LockFile.take(self.path / LOCK_FILE)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(
                f"{self.path}: cannot be written ({reason})", "choose another --work-dir"
            ) from error
        if lock is None:
            raise UsageError(
                f"{self.path}: another run is using it",
                "wait until it is done, or choose another --work-dir",
            )
        try:
            yield
        finally:
            lock.release()
            with suppress(OSError):  # something was written there
                for folder in made:
                    folder.rmdir()

    def _made(self) -> list[Path]:
        """Make the folder, and return those that were not there, the innermost first."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: is a file, expected a folder", "choose a --work-dir")
        made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        return made

    def check_free(self) -> None:
        """Refuse a folder in which something is, but for a run that did not finish a round."""
        if any(not _is_of_the_start(path) for path in self.path.iterdir()):
            raise UsageError(
                f"{self.path}: is not empty",
                f"go on with the run in it with --resume, or {self._start_again}",
            )

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
                "run the same command as before, or choose another --work-dir",
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
        values: dict[str, Any] = msgspec.to_builtins(found)
        return {name: value for name, value in values.items() if name != "sha256"}

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


def _place_of(output: Path) -> str:
    return str(output.resolve())


def _is_of_the_start(path: Path) -> bool:
    """Whether a file was written before the first round was done."""
    return path.name in (RUN_FILE, LOCK_FILE) or path.match(_HIDDEN)
