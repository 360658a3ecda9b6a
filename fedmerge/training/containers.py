"""Files with named arrays: mapped where possible, never unpickled into more than tensors."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fedmerge.errors import TrainingError, UnsafeCheckpointError
from fedmerge.training.npz import map_npz, npz_names
from fedmerge.types.arrays import Array

Columns: TypeAlias = Mapping[str, Callable[[], Array]]
_Read = TypeVar("_Read")

_HINT = "a shard holds samples `x` and targets `y`, in .npz, .pt or .safetensors"
_UNSAFE_HINT = "store plain numbers: np.savez(path, x=x, y=y) or torch.save({'x': x, 'y': y}, path)"
_UNSAFE = ("allow_pickle", "weights_only", "Unsupported global")  # in numpy's and torch's refusals
_FAILURES = (
    *(OSError, ValueError, TypeError, EOFError, KeyError, RuntimeError),
    *(zipfile.BadZipFile, SafetensorError, pickle.UnpicklingError),
)


def open_columns(path: Path) -> Columns:
    """Return the arrays of a file by name, each read or mapped when it is called."""
    if path.suffix.lower() not in _OPENERS:
        raise TrainingError(f"{path}: no shard, for its name ends in '{path.suffix}'", _HINT)
    if not path.is_file():
        raise TrainingError(f"{path}: no such file")
    columns = _guarded(path, lambda: _OPENERS[path.suffix.lower()](path))
    return {name: partial(_guarded, path, read) for name, read in columns.items()}


def as_array(value: object) -> Array:
    """Return an array or a tensor as numpy, sharing its memory where numpy knows its type."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array
    return np.asarray(value)


def _guarded(path: Path, read: Callable[[], _Read]) -> _Read:
    """Read, and say which file could not be read."""
    try:
        return read()
    except _FAILURES as error:
        reason = " ".join(str(error).split())
        if any(mark in reason for mark in _UNSAFE):
            raise UnsafeCheckpointError(
                f"{path}: refused, it holds Python objects, which can run code when loaded",
                _UNSAFE_HINT,
            ) from error
        raise TrainingError(
            f"{path}: cannot be read as {path.suffix} ({type(error).__name__}: {reason[:160]})"
        ) from error


def _open_npz(path: Path) -> Columns:
    return {name: partial(map_npz, path, name) for name in npz_names(path)}


def _open_torch(path: Path) -> Columns:
    is_zip = zipfile.is_zipfile(path)  # files of torch before 1.6 cannot be mapped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about pickles that it then refuses
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, expected a dictionary")
    tensors = {str(k): v for k, v in content.items() if isinstance(v, torch.Tensor)}
    return {name: partial(as_array, tensor) for name, tensor in tensors.items()}


def _open_safetensors(path: Path) -> Columns:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())

    def read(name: str) -> Array:
        with safe_open(path, framework="pt") as file:
            return as_array(file.get_tensor(name))

    return {name: partial(read, name) for name in names}


_OPENERS: Mapping[str, Callable[[Path], Columns]] = {
    ".npz": _open_npz,
    ".pt": _open_torch,
    ".pth": _open_torch,
    ".safetensors": _open_safetensors,
}
