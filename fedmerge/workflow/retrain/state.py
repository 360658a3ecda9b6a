"""The state of a run on disk: after every round, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
from fedmerge.workflow.record import GroupEntry
from fedmerge.workflow.retrain.federation import Federation
from fedmerge.workflow.retrain.history import RoundEntry
from fedmerge.workflow.retrain.locals import LocalModel

RUN_FILE = "run.json"
STATE_FILE = "state.safetensors"
_FIXED = "fixed"
_HIDDEN = ".fedmerge-*.tmp"  # what a killed process may leave


@dataclass(frozen=True)
class SavedState:
    """A run after some of its rounds."""

    federation: Federation
    rounds: tuple[RoundEntry, ...]


@dataclass(frozen=True)
class WorkDir:
    """The folder in which a run keeps its state."""

    path: Path

    def check_empty(self) -> None:
        """Refuse a folder in which something is."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(
                f"{self.path}: is not empty",
                "go on with the run in it with --resume, or choose another --work-dir",
            )

    @property
    def run(self) -> dict[str, Any] | None:
        """What the run in the folder is, None if there is none."""
        path = self.path / RUN_FILE
        if not path.exists():
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: is damaged, expected a JSON object")
        return value

    def begin(self, run: Mapping[str, Any]) -> None:
        """Say which run the folder belongs to, and sweep out what a killed one left."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(_HIDDEN):
            left.unlink()
        write_text(self.path / RUN_FILE, readable(run))

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
            raise CheckpointError(f"{path}: is damaged ({error})", "start again") from error


def first_difference(found: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the first value in which two runs differ, in words."""
    for name in [*saved, *(key for key in found if key not in saved)]:
        one, other = found.get(name), saved.get(name)
        if one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inner = first_difference(one, other)
            return f"{name}: {inner}" if name != "options" else inner
        return f"{name} is {json.dumps(one)}, was {json.dumps(other)}"
    return None


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
    groups = tuple(
        GroupEntry(**{**entry, "client_widths": tuple(entry["client_widths"])})
        for entry in value["groups"]
    )
    fixed = {name: arrays[f"{_FIXED}/{name}"] for name in value["fixed"]}
    federation = Federation(models, fixed, placements, groups)
    return SavedState(federation, tuple(RoundEntry(**entry) for entry in value["rounds"]))
