"""Files and folders of samples: one row of a table for each format, one small reader each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from fedmerge.checkpoint import Rows, in_memory, open_npz, open_tensors
from fedmerge.decoding import shortened
from fedmerge.errors import CheckpointError, TrainingError, UnsafeCheckpointError
from fedmerge.training.tables import SAVED, open_csv, open_parquet, open_saved, read_pictures
from fedmerge.values.arrays import Array
from fedmerge.values.wording import listed

Columns: TypeAlias = Mapping[str, Callable[[], Rows]]
_Read = TypeVar("_Read")

FOLDER = "/"  # stands for folders among the formats
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
TARGETS = ("y", "label", "labels", "target")  # names of targets, the first found wins
_HINT = "samples `x` and targets `y` are in .npz, .pt, .safetensors, .csv, .parquet or a folder"


@dataclass(frozen=True)
class Reading:
    """Which columns are samples and targets, where that is not told by their names."""

    x_keys: tuple[str, ...] = ()  # several: features of a table, or several inputs
    y_key: str = ""
    classes: tuple[str, ...] = ()  # names of classes in their order


def open_columns(path: Path) -> Columns:
    """Return the arrays of a file or folder by name, each read when it is called."""
    if path.is_dir():
        return _guarded(lambda: _open_folder(path))
    if path.suffix.lower() not in FORMATS:
        raise TrainingError(f"{path}: no shard, for its name ends in '{path.suffix}'", _HINT)
    if not path.exists():
        raise TrainingError(f"{path}: no such file")
    columns = _guarded(lambda: FORMATS[path.suffix.lower()](path))
    return {name: partial(_guarded, read) for name, read in columns.items()}


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


def _open_folder(folder: Path) -> Columns:
    """Return the columns of a saved data set, of pictures by class, or of many files together."""
    if (folder / SAVED).is_file():
        return open_saved(folder)
    pictures = list(_pictures_in(folder))
    if pictures:
        names = np.array([path.parent.name for path in pictures])
        return {"x": partial(read_pictures, pictures), "y": lambda: names}
    files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in FORMATS]
    if not files:
        raise TrainingError(f"{folder}: has no samples", _HINT)
    opened = [open_columns(path) for path in files]
    shared = [name for name in opened[0] if all(name in columns for columns in opened)]
    return {name: partial(_joined, [own[name] for own in opened], folder) for name in shared}


def _joined(reads: Sequence[Callable[[], Rows]], folder: Path) -> Array:
    try:
        return np.concatenate([in_memory(read()) for read in reads])
    except ValueError as error:
        raise TrainingError(f"{folder}: its files don't fit together ({error})") from error


def _pictures_in(folder: Path) -> Iterator[Path]:
    """Yield the pictures of a folder's sub-folders, which are its classes."""
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from sorted(path for path in inner.iterdir() if path.suffix.lower() in IMAGES)


def is_one_clients(folder: Path) -> bool:
    """Whether a folder is one client's data, rather than one of clients'."""
    return (folder / SAVED).is_file() or next(_pictures_in(folder), None) is not None


FORMATS: Mapping[str, Callable[[Path], Columns]] = {
    ".npz": open_npz,
    ".pt": _open_tensors,
    ".pth": _open_tensors,
    ".safetensors": _open_tensors,
    ".csv": open_csv,
    ".parquet": open_parquet,
}


def read_samples(
    path: Path, keys: Sequence[tuple[str, str]], reading: Reading
) -> tuple[tuple[Rows, ...], Array]:
    """Return the inputs and the targets of a file or folder.

    Names that the user gives come first, then `keys`; in tables, all columns but the targets are
    features.
    """
    columns = open_columns(path)
    samples, targets = _names(path, columns, keys, reading)
    inputs = _inputs({name: columns[name]() for name in samples}, path)
    return inputs, class_numbers(in_memory(columns[targets]()), reading.classes, str(path))


def _names(
    path: Path, columns: Columns, keys: Sequence[tuple[str, str]], reading: Reading
) -> tuple[Sequence[str], str]:
    for name in (*reading.x_keys, *filter(None, [reading.y_key])):
        if name not in columns:
            raise TrainingError(f"{path}: has no '{name}', only {_listed(columns)}")
    usual = [pair for pair in keys if set(pair) <= set(columns)]
    targets = [reading.y_key] if reading.y_key else [y for _, y in usual]
    if not targets and (reading.x_keys or path.suffix.lower() in _TABLES):
        targets = [name for name in TARGETS if name in columns]
    if targets and reading.x_keys:
        return reading.x_keys, targets[0]
    if targets and path.suffix.lower() in _TABLES and not usual:
        return [name for name in columns if name != targets[0]], targets[0]
    samples = [x for x, _ in usual] or [x for x, _ in keys if x in columns]
    if targets and samples:
        return samples[:1], targets[0]
    expected = " or ".join(f"'{x}' and '{y}'" for x, y in keys)
    raise TrainingError(
        f"{path}: expected {expected}, found {_listed(columns)}",
        "name others with `x_key` and `y_key`",
    )


_TABLES = (".csv", ".parquet")
_MOST_NAMED = 20  # columns in a message


def _listed(columns: Columns) -> str:
    return listed([f"'{shortened(name)}'" for name in columns], _MOST_NAMED) or "nothing"


def _inputs(arrays: Mapping[str, Rows], path: Path) -> tuple[Rows, ...]:
    """Return columns as inputs: neighbours of one number per sample are features of one input."""
    for name, array in arrays.items():
        if array.dtype.kind in "USO":
            raise TrainingError(f"{path}: '{name}' holds text, expected numbers")
    if len(arrays) == 1 and path.suffix.lower() != ".csv":
        return tuple(arrays.values())
    inputs: list[Rows] = []
    for is_flat, group in groupby(arrays.values(), key=lambda array: array.ndim == 1):
        own = list(group)
        inputs += [_features([in_memory(array) for array in own])] if is_flat else own
    return tuple(inputs)


def _features(columns: Sequence[Array]) -> Array:
    return np.stack(columns, axis=1).astype(np.float32)


def class_numbers(targets: Array, classes: Sequence[str], origin: str) -> Array:
    """Return targets whose names of classes are their numbers.

    Clients don't see each other's data, so none can number them by itself.
    """
    if targets.dtype.kind not in "US":
        return targets
    if all(name.isdecimal() for name in targets) and not classes:
        return targets.astype(np.int64)
    place = {name: number for number, name in enumerate(classes)}
    unknown = [str(name) for name in targets if name not in place]
    if unknown:
        raise TrainingError(
            f"{origin}: has the class '{unknown[0]}', expected "
            + (f"one of {', '.join(classes)}" if classes else "numbers"),
            "say in their order which classes there are: `classes=cat,dog`",
        )
    return np.array([place[name] for name in targets], dtype=np.int64)
