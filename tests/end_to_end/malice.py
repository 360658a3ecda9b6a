"""Files that would run code if they were loaded, and leave a mark if they did."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Payload:
    """Creates a file when it is unpickled."""

    mark: Path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


def save_zip(payload: Payload, path: Path) -> None:
    torch.save({"fc1.weight": torch.ones(2, 2), "extra": payload}, path)


def save_legacy(payload: Payload, path: Path) -> None:
    content = {"fc1.weight": torch.ones(2, 2), "extra": payload}
    torch.save(content, path, _use_new_zipfile_serialization=False)


def save_raw(payload: Payload, path: Path) -> None:
    path.write_bytes(pickle.dumps(payload))


def save_old_raw(payload: Payload, path: Path) -> None:
    path.write_bytes(pickle.dumps(payload, protocol=0))
