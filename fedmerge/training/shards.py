"""Shards: the samples and targets of one client, and which client each belongs to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fedmerge.checkpoint import Rows, in_memory
from fedmerge.errors import TrainingCodeError, TrainingError, UsageError
from fedmerge.training.data_formats import Reading, class_numbers, open_columns, read_samples
from fedmerge.training.samples import Data, Preparation, arrays_of, is_named
from fedmerge.user_code import find_object, is_reference, user_code
from fedmerge.values.arrays import Array, IntArray
from fedmerge.values.wording import listed

Keys: TypeAlias = Sequence[tuple[str, str]]  # names of samples and targets, the first found wins

SHARD_KEYS: Keys = (("x", "y"),)
TRAINING_KEYS: Keys = (("x", "y"), ("x_train", "y_train"))  # of a data set to be partitioned
EVALUATION = "evaluation"  # what the evaluation data's owner is called
EVALUATION_KEYS: Keys = (("x", "y"), ("x_test", "y_test"))

_CHUNK = 1 << 20  # bytes of a file that are read at once
Inputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]  # several: forward's arguments

MOST_PAIRS = 8  # of clients and shards that a note names
_TARGETS = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.int64}  # by numpy's kinds


@dataclass(frozen=True)
class Shard:
    """Samples x (n, …) and targets y (n, …) of one client, as they are stored.

    Of many samples, those that are asked for are read.
    """

    name: str
    x: Rows
    y: Array
    preparation: Preparation = field(default_factory=Preparation)
    origin: str = ""  # the file, for messages
    more: tuple[Rows, ...] = ()  # further inputs (n, …) of the model, such as masks
    draw: Callable[[], Shard] | None = None  # the user's function gives other views in each epoch

    def __post_init__(self) -> None:
        where = self.origin or self.name
        for rows in self.more:
            if not rows.ndim or len(rows) != len(self.x):
                raise TrainingError(f"{where}: inputs are {self.x.shape} and {rows.shape}")
            self.preparation.check(rows, where)
        if not self.x.ndim or not self.y.ndim or len(self.x) != len(self.y):
            sizes = f"x is {self.x.shape} and y is {self.y.shape}"
            raise TrainingError(f"{where}: {sizes}, expected one target per sample")
        if not len(self.x):
            raise TrainingError(f"{where}: is empty, expected at least one sample")
        if self.y.dtype.kind not in _TARGETS:
            raise TrainingError(f"{where}: y holds {self.y.dtype}, expected integers or floats")
        self.preparation.check(self.x, where)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def targets(self) -> Array:
        """All targets (n, …) as int64 or float32."""
        return self.y.astype(_TARGETS[self.y.dtype.kind], copy=False)

    def sha256(self) -> str:
        """Return the SHA-256 of all samples and targets."""
        content = hashlib.sha256()
        for array in (self.x[:], *(rows[:] for rows in self.more), self.y):
            content.update(f"{array.dtype.str}{array.shape}".encode())
            content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()

    def split(self, share: float, seed: int) -> tuple[Shard, Shard]:
        """Return the samples to train on, and the share that is held out; at least one of each."""
        if len(self) < 2:
            raise TrainingError(f"{self.origin or self.name}: one sample, nothing can be held out")
        held = min(max(1, round(share * len(self))), len(self) - 1)
        order = np.random.default_rng(seed).permutation(len(self))
        return self._of_rows(np.sort(order[held:])), self._of_rows(np.sort(order[:held]))

    def _of_rows(self, rows: IntArray) -> Shard:
        draw = self.draw
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            more=tuple(own[rows] for own in self.more),
            draw=None if draw is None else lambda: draw()._of_rows(rows),
        )

    def extreme_rows(self) -> IntArray:
        """Return the first two rows and those of the smallest and the largest target."""
        flat = self.y.reshape(len(self), -1)
        if not flat.size:
            return np.arange(min(2, len(self)))
        ends = [int(flat.argmin()) // flat.shape[1], int(flat.argmax()) // flat.shape[1]]
        return np.unique([*range(min(2, len(self))), *ends])

    def batch(self, rows: IntArray, device: str) -> tuple[Inputs, torch.Tensor]:
        """Return the samples and targets of some rows, as a model and its task take them."""
        # Copied into torch's memory: products of unaligned arrays may differ in their last bits.
        inputs = tuple(
            torch.tensor(self.preparation(own[rows])).to(device) for own in (self.x, *self.more)
        )
        y = self.y[rows].astype(_TARGETS[self.y.dtype.kind], copy=False)
        return inputs if self.more else inputs[0], torch.tensor(y).to(device)


def shard_of(
    data: Data,
    argument: str,
    *,
    client: str = "",
    keys: Keys = SHARD_KEYS,
    preparation: Preparation | None = None,
) -> Shard:
    """Return the shard of a file, a function by reference, or an object of the user's."""
    if isinstance(data, Shard):
        return data
    if is_named(data):
        return read_shard(data, client=client, keys=keys, preparation=preparation)
    arrays = arrays_of(data, argument)
    if "y" not in arrays:
        raise UsageError(f"`{argument}` has samples but no targets, expected both (x, y)")
    prepared = preparation or Preparation()
    return Shard(client or argument, arrays["x"], arrays["y"], prepared, argument, _more(arrays))


def as_returned(data: Data, argument: str, *, client: str = "") -> object:
    """Return data as the user's function might: views of a data set may differ in every epoch."""
    if isinstance(data, Dataset | DataLoader):
        return data
    shard = shard_of(data, argument, client=client)
    inputs = [rows[:] for rows in (shard.x, *shard.more)]
    return (tuple(inputs) if shard.more else inputs[0]), shard.y


def _more(arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """Return the further inputs of a model."""
    return tuple(array for name, array in arrays.items() if name.startswith("x."))


def read_shard(
    source: str | Path,
    *,
    client: str = "",
    keys: Keys = SHARD_KEYS,
    preparation: Preparation | None = None,
    reading: Reading | None = None,
) -> Shard:
    """Return the shard of a file or folder, or of the user's own function.

    A source `module:function` or `file.py:function` is called with the client's name and returns
    x and y, a data set or a loader. `client` is the shard's name; without one, it is the file's
    stem.
    """
    text, reading = str(source), reading or Reading()
    name, prepared = client or Path(source).stem, preparation or Preparation()
    if is_reference(text):
        return _called(text, name, prepared, reading)
    (x, *more), y = read_samples(Path(source), keys, reading)
    return Shard(name, x, y, prepared, text, tuple(more))


def read_column(path: Path, name: str) -> Array:
    """Return a further array of a data set, such as the key by which it is split."""
    columns = open_columns(path)
    if name not in columns:
        found = ", ".join(f"'{column}'" for column in columns)
        raise UsageError(f"{path}: there is no '{name}', only {found or 'nothing'}")
    return in_memory(columns[name]())


@dataclass(frozen=True)
class Pairing:
    """Which shard belongs to which client, and why."""

    shards: Mapping[str, Path]  # client → file, in the clients' order
    why: str


def pair_shards(clients: Sequence[str], paths: Sequence[Path]) -> Pairing:
    """Pair clients with shards by the files' stems if every one has a partner, else in order.

    The order is the natural one of both, c2 before c10.

    >>> pair_shards(["b", "a"], [Path("a.npz"), Path("b.npz")]).shards["b"].name
    'b.npz'
    """
    if len(clients) != len(paths):
        raise UsageError(
            f"there are {len(clients)} clients but {len(paths)} shards", "give one shard per client"
        )
    by_stem = {path.stem: path for path in paths}
    if set(by_stem) == set(clients):
        return Pairing({name: by_stem[name] for name in clients}, "paired by name")
    names, files = sorted(clients, key=natural_order), sorted(paths, key=natural_order)
    in_order = dict(zip(names, files, strict=True))
    pairs = listed([f"{name} ← {path.name}" for name, path in in_order.items()], MOST_PAIRS)
    return Pairing(
        {name: in_order[name] for name in clients},
        f"the names of clients and shards differ: paired in order ({pairs})",
    )


def _called(reference: str, client: str, preparation: Preparation, reading: Reading) -> Shard:
    """Return the shard that the user's function gives; of a data set, views may differ."""
    result, arrays = _call(reference, client, reading)
    shard = Shard(client, arrays["x"], arrays["y"], preparation, reference, _more(arrays))
    if not isinstance(result, Dataset | DataLoader):
        return shard
    return replace(shard, draw=lambda: _called(reference, client, preparation, reading))


def _call(reference: str, client: str, reading: Reading) -> tuple[object, dict[str, Array]]:
    load = find_object(reference, what="function that returns x and y")
    if not callable(load):
        raise UsageError(f"'{reference}' is no function", "it is called with the client's name")
    with user_code(f"'{reference}' fails", error=TrainingCodeError):
        result = load(client)
        expected = (tuple, list, Mapping, Dataset, DataLoader)
        arrays = arrays_of(result, reference, reading) if isinstance(result, expected) else {}
    if not {"x", "y"} <= set(arrays):
        found = type(result).__name__
        raise TrainingError(
            f"'{reference}' returns {found}, expected samples and targets (x, y)",
            "or a Dataset or DataLoader of such",
        )
    arrays["y"] = class_numbers(arrays["y"], reading.classes, reference)
    return result, arrays


def source_digest(source: str) -> str:
    """Return the SHA-256 of a file's bytes, of all files of a folder, or of a reference's text."""
    content = hashlib.sha256()
    if is_reference(source):
        content.update(source.encode())
        return content.hexdigest()
    path = Path(source)
    if path.is_dir():
        for inner in sorted(one for one in path.rglob("*") if one.is_file()):
            content.update(f"{inner.relative_to(path)}:{source_digest(str(inner))}\n".encode())
        return content.hexdigest()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()


def natural_order(name: str | Path) -> list[tuple[int, str, int]]:
    """Order c2 before c10."""
    parts = re.findall(r"(\d+)|(\D+)", str(name))
    return [(0, "", int(number)) if number else (1, text, 0) for number, text in parts]
