"""Samples of files, and those that are given in Python: arrays, tensors, data sets and loaders."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from numpy.lib import format as npy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedmerge.checkpoint import Rows
from fedmerge.errors import TrainingCodeError, TrainingError, UsageError
from fedmerge.training.data_formats import TARGETS, Reading
from fedmerge.user_code import user_code
from fedmerge.values.arrays import Array
from fedmerge.values.option_fields import check_options


@dataclass(frozen=True)
class Column:
    """An array to be written: its shape, numpy's code of its dtype, and its rows in blocks."""

    shape: tuple[int, ...]
    dtype: str
    blocks: Iterable[Array]


def write_npz(file: IO[bytes], columns: Mapping[str, Column]) -> None:
    """Write arrays uncompressed: rows can be read alone, and the bytes depend on content alone."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": column.dtype, "fortran_order": False, "shape": column.shape}
                npy.write_array_header_1_0(member, header)
                for block in column.blocks:
                    member.write(np.ascontiguousarray(block, column.dtype).tobytes())


def as_array(value: object) -> Array:
    """Return an array or a tensor as numpy, sharing its memory where numpy knows its type."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array
    return np.asarray(value)


BRIGHTEST = 255  # of a byte's pixel
_CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency
_TARGET = {"f": np.float32, "i": np.int64, "u": np.int64}  # numpy's kinds → what models take
_PIXELS_HINT = (
    "pixels: normalise them with `normalize=MEAN,STD` (of x/255); tokens: store them as int64"
)


@dataclass(frozen=True)
class Preparation:
    """How images of bytes are normalised, (x/255 - mean)/std, and where channels stand.

    Floats are taken as they are: they were normalised by whoever wrote them.
    """

    mean: tuple[float, ...] = ()  # one number or one per channel; none: bytes are refused
    std: tuple[float, ...] = ()
    channels_last: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if len(self.mean) != len(self.std):
            raise UsageError(f"{len(self.mean)} means but {len(self.std)} deviations")
        if not np.isfinite([*self.mean, *self.std]).all() or any(s <= 0 for s in self.std):
            raise UsageError(
                f"`normalize` has means {self.mean} and deviations {self.std}, "
                "expected finite numbers, deviations above 0"
            )

    def __call__(self, x: Array) -> Array:
        """Return samples (n, …) as a model takes them: float32 or int64, channels before pixels."""
        x = self._channels_first(x)
        if x.dtype == np.uint8:
            mean, std = (self._per_channel(values, x) for values in (self.mean, self.std))
            return (x.astype(np.float32) / BRIGHTEST - mean) / std
        return x.astype(_TARGET[x.dtype.kind], copy=False)

    def check(self, x: Rows, origin: str) -> None:
        """Raise `TrainingError` if samples (n, …) are nothing that this can prepare."""
        if x.dtype.kind not in _TARGET:
            raise TrainingError(f"{origin}: x holds {x.dtype}, expected floats, integers or pixels")
        if x.dtype != np.uint8:
            return
        if not self.mean:
            raise TrainingError(f"{origin}: x holds bytes (uint8), expected floats", _PIXELS_HINT)
        if not self.channels_last and _channel_axis(x.shape) == 3:
            raise TrainingError(
                f"{origin}: x is {x.shape}, its channels seem to come last",
                "models take channels before pixels: give `channels_last` to turn them",
            )
        shape = self._channels_first(x[:1]).shape
        if len(self.mean) not in (1, *shape[1:2]):
            raise TrainingError(
                f"{origin}: `normalize` has {len(self.mean)} means, but x has {shape[1]} channels"
            )

    def _channels_first(self, x: Array) -> Array:
        if x.ndim == 3 and x.dtype == np.uint8:  # grey images: one channel
            return x[:, None]
        if self.channels_last and x.ndim == 4 and _channel_axis(x.shape) != 1:
            return np.moveaxis(x, -1, 1)
        return x

    @staticmethod
    def _per_channel(values: tuple[float, ...], x: Array) -> Array:
        array: Array = np.asarray(values, np.float32)
        return array.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim > 1 else array


def parse_normalize(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return means and deviations of "MEAN,STD", or of all means and then all deviations.

    >>> parse_normalize("0.5,0.4,0.3,0.2,0.2,0.1")
    ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or len(numbers) % 2:
        raise UsageError(
            f"`normalize` is '{text}', expected MEAN,STD",
            "for colours: the means of all channels, then their deviations",
        )
    half = len(numbers) // 2
    return tuple(numbers[:half]), tuple(numbers[half:])


def _channel_axis(shape: tuple[int, ...]) -> int | None:
    """Return where the channels of images (n, …) evidently stand, None if that is not evident."""
    if len(shape) != 4 or (shape[1] in _CHANNELS) == (shape[3] in _CHANNELS):
        return None
    return 1 if shape[1] in _CHANNELS else 3


# A path or a reference, arrays or tensors (x, y), {"x": …, "y": …}, a data set or a loader.
Data: TypeAlias = Any

_EXPECTED = "a path, arrays (x, y), a Dataset or a DataLoader"


def is_named(data: Data) -> bool:
    """Whether data are a file, a folder, a glob or a function by reference."""
    return isinstance(data, str | Path)


def arrays_of(data: Data, argument: str, reading: Reading | None = None) -> dict[str, Array]:
    """Return the samples `x` (n, …) of an object, and its targets `y` (n, …) where it has any.

    Further inputs are `x.1`, `x.2`, … `argument` is what messages call the object.
    """
    reading = reading or Reading()
    with user_code(f"`{argument}` can't be read", error=TrainingCodeError):
        if isinstance(data, DataLoader):
            return _joined([_parts(batch, argument, reading) for batch in data], argument)
        if isinstance(data, Dataset):
            return _stacked(data, argument, reading)
        return _parts(data, argument, reading)


def _stacked(data: Dataset[Any], argument: str, reading: Reading) -> dict[str, Array]:
    """Return a data set's samples, one by one."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        samples: Iterable[Any] = iter(data) if hasattr(data, "__iter__") else ()
    else:
        samples = (data[number] for number in range(len(data)))
    parts = [_parts(sample, argument, reading) for sample in samples]
    rows = [{name: value[None] for name, value in part.items()} for part in parts]
    return _joined(rows, argument)


def _joined(parts: Sequence[Mapping[str, Array]], argument: str) -> dict[str, Array]:
    if not parts:
        raise UsageError(f"`{argument}` is empty, expected at least one sample")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _parts(value: Any, argument: str, reading: Reading) -> dict[str, Array]:
    """Return what is x and what is y of a batch, a sample, or all of them."""
    if isinstance(value, Mapping):
        return _by_name(value, argument, reading)
    if isinstance(value, tuple | list) and len(value) == 2:
        return {**_numbered(value[0]), "y": as_array(value[1])}
    array = as_array(value)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"`{argument}` is {type(value).__name__}, expected {_EXPECTED}")
    return {"x": array}


def _by_name(value: Mapping[Any, Any], argument: str, reading: Reading) -> dict[str, Array]:
    samples = reading.x_keys or ("x",)
    if missing := [name for name in samples if name not in value]:
        raise UsageError(
            f"`{argument}` has no '{missing[0]}', only {', '.join(map(repr, value))}",
            "name others with `x_key` and `y_key`",
        )
    target = reading.y_key or next((name for name in TARGETS if name in value), "y")
    parts = _numbered(tuple(value[name] for name in samples))
    return {**parts, "y": as_array(value[target])} if target in value else parts


def _numbered(inputs: Any) -> dict[str, Array]:
    """Return a model's inputs as x, x.1, …: loaders make lists of tensors of them."""
    is_listed = isinstance(inputs, list) and all(isinstance(i, torch.Tensor) for i in inputs)
    if not isinstance(inputs, tuple) and not (is_listed and inputs):
        return {"x": as_array(inputs)}
    names = ["x", *(f"x.{number}" for number in range(1, len(inputs)))]
    return {name: as_array(one) for name, one in zip(names, inputs, strict=True)}
