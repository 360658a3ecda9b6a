"""The state of a run on disk: after every round, whole or not at all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fedmerge.checkpoint import readable, write_model, write_text
from fedmerge.errors import CheckpointError, UsageError
from fedmerge.types.arrays import Array
from fedmerge.types.assignments import Assignment
from fedmerge.types.clients import TensorInfo
from fedmerge.types.words import listed
from fedmerge.workflow.record import group_entry
from fedmerge.workflow.retrain.federation import Federation
from fedmerge.workflow.retrain.history import RoundEntry
from fedmerge.workflow.retrain.locals import LocalModel

RUN_FILE = "run.json"
STATE_FILE = "state.safetensors"
MOST_CHANGED = 8  # clients whose files differ that an error names
_FIXED = "fixed"
_HIDDEN = ".fedmerge-*.tmp"  # what a killed process may leave


@dataclass(frozen=True)
class SavedState:
    """A run after some of its rounds."""

    federation: Federation
    rounds: tuple[RoundEntry, ...]


def default_work_dir(output: Path) -> Path:
    """Return where a run keeps its state unless it is told."""
    return output.with_name(output.name + ".work")


@dataclass(frozen=True)
class WorkDir:
    """The folder in which a run keeps its state."""

    path: Path

    def check_free(self) -> None:
        """Refuse a folder in which something is, but for a run that did not finish a round."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: is a file, expected a folder", "choose a --work-dir")
        if any(not _is_of_the_start(path) for path in self.path.iterdir()):
            raise UsageError(
                f"{self.path}: is not empty",
                f"go on with the run in it with --resume, or {self._start_again}",
            )

    @property
    def _start_again(self) -> str:
        return f"start again: remove it ({shlex.join(['rm', '-r', str(self.path)])})"

    @property
    def run(self) -> dict[str, Any] | None:
        """What the run in the folder is, None if there is none or it has not finished a round."""
        path = self.path / RUN_FILE
        if not path.exists() or not (self.path / STATE_FILE).exists():
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})", self._start_again) from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: is damaged, expected a JSON object", self._start_again)
        return value

    def begin(self, run: Mapping[str, Any]) -> None:
        """Say which run the folder belongs to, and sweep out what a killed one left."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(_HIDDEN):
            left.unlink()
        write_text(self.path / RUN_FILE, readable(run), force=True)

    def save(self, state: SavedState) -> None:
        """Replace the state by the one after another round."""
        arrays = dict(_named_arrays(state.federation))
        write_model(
            self.path / STATE_FILE,
            {name: TensorInfo(a.shape, a.dtype.name) for name, a in arrays.items()},
            lambda name: arrays[name],
            record=lambda digests: _to_json(state),
            force=True,
        )

    def load(self) -> SavedState | None:
        """Return the state after the last complete round, None before the first."""
        path = self.path / STATE_FILE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                names = list(file.keys())
                arrays = {name: np.array(file.get_tensor(name)) for name in names}
                text = file.metadata()["fedmerge"]
            return _from_json(json.loads(text), arrays)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: is damaged ({error})", self._start_again) from error


def _is_of_the_start(path: Path) -> bool:
    """Whether a file was written before the first round was done."""
    return path.name == RUN_FILE or path.match(_HIDDEN)


def first_difference(found: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the first value in which two runs differ, in words."""
    for name in [*saved, *(key for key in found if key not in saved)]:
        one, other = found.get(name), saved.get(name)
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
_FILES = {"data": "--data", "continued_from": "the merged file", "sha256": "the code of --model"}
_DIFFERENCES: Mapping[str, Callable[[str, Any, Any], str]] = {
    "options": _inner_difference,
    "model": _inner_difference,
    "name": lambda name, found, saved: f"--model is {found}, was {saved}",
    "arguments": lambda name, found, saved: f"--model-arg is {found}, was {saved}",
    "sha256": _given_difference,
    "continued_from": _given_difference,
    "clients": _files_difference,
    "shards": _files_difference,
    "data": _given_difference,
    "plan": lambda name, found, saved: "the plan is another one",
}


def _named_arrays(federation: Federation) -> Iterator[tuple[str, Array]]:
    for name, array in federation.fixed.items():
        yield f"{_FIXED}/{name}", array
    for number, model in enumerate(federation.locals):
        for name, array in model.arrays.items():
            yield f"{number}/{name}", array


def _to_json(state: SavedState) -> dict[str, Any]:
    federation = state.federation
    return {
        "clients": [model.name for model in federation.locals],
        "fixed": list(federation.fixed),
        "tensors": [list(model.arrays) for model in federation.locals],
        "placements": [
            {group: [a.width, a.indices.tolist()] for group, a in placement.items()}
            for placement in federation.placements
        ],
        "groups": [group.to_json() for group in federation.groups],
        "rounds": [asdict(entry) for entry in state.rounds],
    }


def _from_json(value: Mapping[str, Any], arrays: Mapping[str, Array]) -> SavedState:
    names: Sequence[str] = value["clients"]
    models = tuple(
        LocalModel(name, {own: arrays[f"{number}/{own}"] for own in value["tensors"][number]})
        for number, name in enumerate(names)
    )
    placements = tuple(
        {g: Assignment(np.array(indices, np.int64), width) for g, (width, indices) in p.items()}
        for p in value["placements"]
    )
    groups = tuple(map(group_entry, value["groups"]))
    fixed = {name: arrays[f"{_FIXED}/{name}"] for name in value["fixed"]}
    federation = Federation(models, fixed, placements, groups)
    return SavedState(federation, tuple(RoundEntry(**entry) for entry in value["rounds"]))
