"""`partition`: a data set to one ready shard per client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedmerge.checkpoint import check_targets, naming_alone, staging
from fedmerge.errors import FedmergeError, TrainingError, UsageError
from fedmerge.federated.inputs import SHARD_SUFFIXES
from fedmerge.federated.options import PartitionOptions as PartitionOptions
from fedmerge.training import (
    TRAINING_KEYS,
    Parts,
    Preparation,
    Shard,
    read_column,
    read_shard,
    split_by_dirichlet,
    split_by_key,
    split_homogeneously,
    write_shards,
)
from fedmerge.training.data_formats import open_columns
from fedmerge.training.shards import EVALUATION_KEYS
from fedmerge.user_code import is_reference
from fedmerge.values.arrays import Array

MOST_CLASSES = 100_000  # larger integers are numbers, not classes


@dataclass(frozen=True)
class WrittenShard:
    """One client's shard: where it is and what is in it."""

    client: str
    path: Path
    samples: int
    class_counts: tuple[int, ...] | None  # None: y is no class numbers


@dataclass(frozen=True)
class Partition:
    """What was written, and what was left out."""

    shards: tuple[WrittenShard, ...]
    left_out: tuple[str, ...]  # clients with too few samples
    kept_apart: tuple[str, ...]  # columns for evaluation, which no shard has

    def to_json(self) -> dict[str, Any]:
        """Return the partition as `--json` prints it."""
        counts = {s.client: s.class_counts for s in self.shards if s.class_counts is not None}
        return {
            "shards": [
                {"client": s.client, "file": str(s.path), "samples": s.samples} for s in self.shards
            ],
            "class_counts": {name: list(found) for name, found in counts.items()} or None,
            "left_out": list(self.left_out),
            "kept_apart": list(self.kept_apart),
        }


def partition(
    data: str | Path,
    folder: str | Path,
    options: PartitionOptions,
    *,
    preparation: Preparation | None = None,
    force: bool = False,
) -> Partition:
    """Split the samples of a file among clients, and write them as `folder/<client>.npz`."""
    folder = Path(folder)
    _check_folder(folder)
    shard = read_shard(data, keys=TRAINING_KEYS, preparation=preparation)
    parts, left_out = _split(shard, options)
    paths = {name: folder / f"{name}.npz" for name in parts}
    inputs = [] if is_reference(str(data)) else [Path(data)]
    check = partial(_check_shards, folder, list(paths.values()), inputs=inputs, force=force)
    check()
    with _new_folder(folder):
        _write(folder, shard, parts, check=check, force=force)
    counts = _class_counts(shard.targets, parts)
    written = (
        WrittenShard(name, path, len(parts[name]), counts.get(name)) for name, path in paths.items()
    )
    return Partition(tuple(written), left_out, _kept_apart(inputs))


def _split(shard: Shard, options: PartitionOptions) -> tuple[Parts, tuple[str, ...]]:
    """Return every client's rows, and the clients whose samples are too few."""
    rng = np.random.default_rng(options.seed)
    least = options.min_samples
    if options.by is not None:
        return _split_by_column(shard, options.by, least)
    assert options.clients is not None
    if options.dirichlet is not None:
        alpha = options.dirichlet
        return split_by_dirichlet(shard.targets, options.clients, alpha, rng=rng, least=least), ()
    if len(shard) < least * options.clients:
        raise UsageError(
            f"{len(shard)} samples cannot be split among {options.clients} clients of at least "
            f"{least}"
        )
    return split_homogeneously(shard.targets, options.clients, rng=rng), ()


def _split_by_column(shard: Shard, column: str, least: int) -> tuple[Parts, tuple[str, ...]]:
    keys = read_column(Path(shard.origin), column)
    if keys.ndim == 1 and len(keys) != len(shard):
        raise TrainingError(
            f"{shard.origin}: '{column}' has {len(keys)} values for {len(shard)} samples"
        )
    parts = split_by_key(keys)
    large = {name: rows for name, rows in parts.items() if len(rows) >= least}
    if not large:
        raise TrainingError(
            f"{shard.origin}: no value of '{column}' has {least} samples",
            "take a smaller `min_samples`",
        )
    return large, tuple(name for name in parts if name not in large)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file, not a folder for shards")
    if not folder.is_dir():
        check_targets([folder], inputs=[], force=False)


def _check_shards(
    folder: Path, targets: Sequence[Path], *, inputs: Sequence[Path], force: bool
) -> None:
    """Refuse to overwrite, and to mix new shards with others that the folder has."""
    if not folder.is_dir():
        return
    check_targets(targets, inputs=inputs, force=force)
    there = {path for path in folder.iterdir() if path.suffix.lower() in SHARD_SUFFIXES}
    if others := sorted(there - set(targets)):
        raise UsageError(
            f"{folder}: has {others[0].name}, which would stand among the new shards",
            "remove it, or choose another folder",
        )


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, unless it exists; if the work in it fails, there is none again."""
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # another run has put something there
                folder.rmdir()
        raise


def _write(
    folder: Path, shard: Shard, parts: Parts, *, check: Callable[[], None], force: bool
) -> None:
    """Write all shards, then give them their names, unless others came meanwhile."""
    try:
        with staging() as stage:

            def create(path: Path) -> IO[bytes]:
                if stage.paths:
                    stage.finish(stage.paths[-1])  # systems allow few open files, keys are many
                return stage.create(path)

            write_shards(folder, shard, parts, create=create)
            with naming_alone(folder):
                check()
                stage.commit(force=force)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FedmergeError(f"{folder}: the shards can't be written ({reason})") from error


def _class_counts(targets: Array, parts: Parts) -> Mapping[str, tuple[int, ...]]:
    """Return how often each class (largest + 1,) occurs in every part; {} for other targets."""
    is_class = targets.ndim == 1 and targets.dtype.kind == "i"
    if not is_class or targets.min() < 0 or targets.max() >= MOST_CLASSES:
        return {}
    classes = int(targets.max()) + 1
    return {
        name: tuple(np.bincount(targets[rows], minlength=classes).tolist())
        for name, rows in parts.items()
    }


def _kept_apart(inputs: Sequence[Path]) -> tuple[str, ...]:
    """Return the columns of the data set that only evaluation reads."""
    columns = {name for path in inputs for name in open_columns(path)}
    trained = {name for pair in TRAINING_KEYS for name in pair}
    evaluated = [name for pair in EVALUATION_KEYS for name in pair if name not in trained]
    return tuple(name for name in evaluated if name in columns)
