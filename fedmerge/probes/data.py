"""Real inputs without labels, read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmerge.checkpoint import Rows
from fedmerge.errors import TrainingError
from fedmerge.probes.probe_inputs import Probes
from fedmerge.training.data_formats import Columns, open_columns
from fedmerge.training.samples import Data, Preparation, arrays_of, is_named
from fedmerge.values.arrays import IntArray

_NAMES = ("x", "x_train", "x_test")  # of the samples, the first found wins
_HINT = "probe data holds inputs `x`, in .npz, .pt or .safetensors; labels are not needed"


def read_probes(
    data: Data,
    *,
    count: int | None = None,
    seed: int = 0,
    preparation: Preparation | None = None,
    arguments: Sequence[str] = (),
    like: tuple[Tensor, ...] | None = None,
) -> Probes:
    """Return inputs of a file or an object, or a random `count` of them, as a model takes them.

    The input is `x`, `x_train`, `x_test` or the only array; those of a model with several inputs
    have the names of forward's `arguments`. Floats get the dtypes of the examples `like`.
    """
    path = Path(data) if is_named(data) else Path("probe_data")
    arrays: dict[str, Rows]
    try:
        if is_named(data):
            columns = open_columns(path)
            arrays = {name: columns[name]() for name in _names(path, columns, arguments)}
        else:
            arrays = {"x": arrays_of(data, "probe_data")["x"]}
    except TrainingError as error:
        raise TrainingError(error.problem, _HINT) from error
    preparation = preparation or Preparation()
    for name, array in arrays.items():
        _check(array, name, preparation, path)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{length} of '{name}'" for name, length in lengths.items())
        raise TrainingError(f"{path}: there are {found}, expected as many of each input")
    rows = _rows(min(lengths.values()), count, seed)
    inputs = tuple(_tensor(array, rows, preparation) for array in arrays.values())
    for name, tensor in zip(arrays, inputs, strict=True):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise TrainingError(f"{path}: '{name}' has NaN or infinite numbers")
    return Probes(_cast(inputs, like, path), "data")


def _names(path: Path, columns: Columns, arguments: Sequence[str]) -> Sequence[str]:
    """Return the names of the arrays that are the model's inputs."""
    if arguments and set(arguments) <= set(columns):
        return arguments
    usual = [name for name in _NAMES if name in columns]
    candidates = usual[:1] or list(columns)
    if len(candidates) == 1 and len(arguments) < 2:
        return candidates
    wanted = [f"'{name}'" for name in arguments] if len(arguments) > 1 else ["'x'"]
    found = ", ".join(f"'{name}'" for name in columns) or "nothing"
    raise TrainingError(f"{path}: expected {' and '.join(wanted)}, found {found}")


def _check(array: Rows, name: str, preparation: Preparation, path: Path) -> None:
    if not array.ndim or not len(array):
        raise TrainingError(f"{path}: '{name}' is {array.shape}, expected at least one sample")
    preparation.check(array, str(path))


def _rows(samples: int, count: int | None, seed: int) -> IntArray:
    """Return which samples are taken, in the file's order: files are read forwards."""
    if count is None or count >= samples:
        return np.arange(samples)
    return np.sort(np.random.default_rng(seed).choice(samples, count, replace=False))


def _tensor(array: Rows, rows: IntArray, preparation: Preparation) -> Tensor:
    return torch.tensor(preparation(array[rows]))


def _cast(
    inputs: tuple[Tensor, ...], like: tuple[Tensor, ...] | None, path: Path
) -> tuple[Tensor, ...]:
    """Return inputs with the precision of the examples."""
    if like is None:
        return inputs
    if len(inputs) != len(like):
        raise TrainingError(
            f"{path}: found {len(inputs)} input, but the model takes {len(like)}", _HINT
        )
    pairs = zip(inputs, like, strict=True)
    for got, wanted in zip(inputs, like, strict=True):
        if got.is_floating_point() != wanted.is_floating_point():
            raise TrainingError(
                f"{path}: the inputs are {_kind(got)}, but the model takes {_kind(wanted)}"
            )
    return tuple(got.to(wanted.dtype) for got, wanted in pairs)


def _kind(tensor: Tensor) -> str:
    return "floats" if tensor.is_floating_point() else "whole numbers"
