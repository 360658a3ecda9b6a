"""Samples that are given in Python: arrays, tensors, data sets and loaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedmerge.errors import TrainingCodeError, UsageError
from fedmerge.training.samples import as_array
from fedmerge.user_code import user_code
from fedmerge.values.arrays import Array

# A path or a reference, arrays or tensors (x, y), {"x": …, "y": …}, a data set or a loader.
Data: TypeAlias = Any

_EXPECTED = "a path, arrays (x, y), a Dataset or a DataLoader"


def is_named(data: Data) -> bool:
    """Whether data are a file, a folder, a glob or a function by reference."""
    return isinstance(data, str | Path)


def arrays_of(data: Data, argument: str) -> dict[str, Array]:
    """Return the samples `x` (n, …) of an object, and its targets `y` (n, …) where it has any.

    `argument` is what messages call it.
    """
    with user_code(f"`{argument}` can't be read", error=TrainingCodeError):
        if isinstance(data, DataLoader):
            return _joined([_parts(batch, argument) for batch in data], argument)
        if isinstance(data, Dataset):
            return _stacked(data, argument)
        return _parts(data, argument)


def _stacked(data: Dataset[Any], argument: str) -> dict[str, Array]:
    """Return a data set's samples, one by one."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        samples: Iterable[Any] = iter(data) if hasattr(data, "__iter__") else ()
    else:
        samples = (data[number] for number in range(len(data)))
    parts = [_parts(sample, argument) for sample in samples]
    rows = [{name: value[None] for name, value in part.items()} for part in parts]
    return _joined(rows, argument)


def _joined(parts: Sequence[Mapping[str, Array]], argument: str) -> dict[str, Array]:
    if not parts:
        raise UsageError(f"`{argument}` is empty, expected at least one sample")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _parts(value: Any, argument: str) -> dict[str, Array]:
    """Return what is x and what is y of a batch, a sample, or all of them."""
    if isinstance(value, Mapping) and "x" in value:
        return {name: as_array(value[name]) for name in ("x", "y") if name in value}
    if isinstance(value, tuple | list) and len(value) == 2:
        return {"x": as_array(value[0]), "y": as_array(value[1])}
    array = as_array(value)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"`{argument}` is {type(value).__name__}, expected {_EXPECTED}")
    return {"x": array}
