"""Files with named arrays: what is wrong with one is an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from fedmerge.checkpoint import Rows, open_npz, open_tensors
from fedmerge.errors import CheckpointError, TrainingError, UnsafeCheckpointError
from fedmerge.types.arrays import Array

Columns: TypeAlias = Mapping[str, Callable[[], Rows]]
_Read = TypeVar("_Read")

_HINT = "a shard holds samples `x` and targets `y`, in .npz, .pt or .safetensors"


def open_columns(path: Path) -> Columns:
    """Return the arrays of a file by name, each read when it is called."""
    if path.suffix.lower() not in _OPENERS:
        raise TrainingError(f"{path}: no shard, for its name ends in '{path.suffix}'", _HINT)
    if not path.is_file():
        raise TrainingError(f"{path}: no such file")
    columns = _guarded(lambda: _OPENERS[path.suffix.lower()](path))
    return {name: partial(_guarded, read) for name, read in columns.items()}


def as_array(value: object) -> Array:
    """Return an array or a tensor as numpy, sharing its memory where numpy knows its type."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array
    return np.asarray(value)


def _guarded(read: Callable[[], _Read]) -> _Read:
    """Read, and take what is wrong with a file for what is wrong with a shard."""
    try:
        return read()
    except UnsafeCheckpointError:
        raise
    except CheckpointError as error:
        raise TrainingError(error.problem, error.hint) from error


def _open_tensors(path: Path) -> Columns:
    opened = open_tensors(path)
    return {name: partial(opened.read, name) for name in opened.tensors}


_OPENERS: Mapping[str, Callable[[Path], Columns]] = {
    ".npz": open_npz,
    ".pt": _open_tensors,
    ".pth": _open_tensors,
    ".safetensors": _open_tensors,
}
