"""Shards: the samples and targets of one client, and which client each belongs to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from fedmerge.checkpoint import Rows, in_memory
from fedmerge.errors import TrainingCodeError, TrainingError, UsageError
from fedmerge.training.samples import Data, Preparation, arrays_of, as_array, is_named, open_columns
from fedmerge.user_code import find_object, is_reference, user_code
from fedmerge.values.arrays import Array, IntArray
from fedmerge.values.wording import listed

Keys: TypeAlias = Sequence[tuple[str, str]]  # names of samples and targets, the first found wins

SHARD_KEYS: Keys = (("x", "y"),)
TRAINING_KEYS: Keys = (("x", "y"), ("x_train", "y_train"))  # of a data set to be partitioned
EVALUATION = "evaluation"  # what the evaluation data's owner is called
EVALUATION_KEYS: Keys = (("x", "y"), ("x_test", "y_test"))

_CHUNK = 1 << 20  # bytes of a file that are read at once
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

    def __post_init__(self) -> None:
        where = self.origin or self.name
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
        for array in (self.x[:], self.y):
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
        return replace(self, x=self.x[rows], y=self.y[rows])

    def extreme_rows(self) -> IntArray:
        """Return the first two rows and those of the smallest and the largest target."""
        flat = self.y.reshape(len(self), -1)
        if not flat.size:
            return np.arange(min(2, len(self)))
        ends = [int(flat.argmin()) // flat.shape[1], int(flat.argmax()) // flat.shape[1]]
        return np.unique([*range(min(2, len(self))), *ends])

    def batch(self, rows: IntArray, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and targets of some rows, as a model and its task take them."""
        x = self.preparation(self.x[rows])
        y = self.y[rows].astype(_TARGETS[self.y.dtype.kind], copy=False)
        # Copied into torch's memory: products of unaligned arrays may differ in their last bits.
        return torch.tensor(x).to(device), torch.tensor(y).to(device)


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
    return Shard(
        client or argument, arrays["x"], arrays["y"], preparation or Preparation(), argument
    )


def read_shard(
    source: str | Path,
    *,
    client: str = "",
    keys: Keys = SHARD_KEYS,
    preparation: Preparation | None = None,
) -> Shard:
    """Return the shard of a file, or of the user's own function.

    A source `module:function` or `file.py:function` is called with the client's name and returns
    x and y. `client` is the shard's name; without one, it is the file's stem.
    """
    text = str(source)
    x: Rows
    x, y = _call(text, client) if is_reference(text) else _read(Path(source), keys)
    name = client or Path(source).stem
    return Shard(name, x, y, preparation or Preparation(), text)


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


def _read(path: Path, keys: Keys) -> tuple[Rows, Array]:
    columns = open_columns(path)
    for samples, targets in keys:
        if samples in columns and targets in columns:
            return columns[samples](), in_memory(columns[targets]())
    expected = " or ".join(f"'{samples}' and '{targets}'" for samples, targets in keys)
    found = ", ".join(f"'{name}'" for name in columns) or "nothing"
    raise TrainingError(f"{path}: expected {expected}, found {found}")


def _call(reference: str, client: str) -> tuple[Array, Array]:
    load = find_object(reference, what="function that returns x and y")
    if not callable(load):
        raise UsageError(f"'{reference}' is no function", "it is called with the client's name")
    with user_code(f"'{reference}' fails", error=TrainingCodeError):
        result = load(client)
        if isinstance(result, Mapping) and {"x", "y"} <= set(result):
            result = (result["x"], result["y"])
        if not isinstance(result, tuple | list) or len(result) != 2:
            found = type(result).__name__
            raise TrainingError(
                f"'{reference}' returns {found}, expected samples and targets (x, y)"
            )
        return as_array(result[0]), as_array(result[1])


def source_digest(source: str) -> str:
    """Return the SHA-256 of a file's bytes, or of a reference's text."""
    content = hashlib.sha256()
    if is_reference(source):
        content.update(source.encode())
        return content.hexdigest()
    with Path(source).open("rb") as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()


def natural_order(name: str | Path) -> list[tuple[int, str, int]]:
    """Order c2 before c10."""
    parts = re.findall(r"(\d+)|(\D+)", str(name))
    return [(0, "", int(number)) if number else (1, text, 0) for number, text in parts]
