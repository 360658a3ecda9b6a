"""Split a data set into shards: evenly, skewed as in the paper, or by a key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np

from fedmerge.errors import TrainingError, UsageError
from fedmerge.training.samples import Column, write_npz
from fedmerge.training.shards import Shard
from fedmerge.values.arrays import Array, IntArray

Parts: TypeAlias = Mapping[str, IntArray]  # client → its rows, ascending

DRAWS = 1000  # of class proportions, before a partition without empty clients is given up
_BLOCK = 1024  # rows prepared and written at a time


def split_homogeneously(labels: Array, clients: int, *, rng: np.random.Generator) -> Parts:
    """Deal every class of labels (n,) to the clients in turn: sizes and classes differ by one.

    Targets (n, …) with more axes are dealt as one class.
    """
    _check_sizes(len(labels), clients)
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")] if labels.ndim == 1 else order
    return _named([by_class[number::clients] for number in range(clients)])


def split_by_dirichlet(
    labels: Array,
    clients: int,
    alpha: float,
    *,
    rng: np.random.Generator,
    least: int = 1,
) -> Parts:
    """Give client j the share p_kj of each class k of labels (n,), where p_k ~ Dir(alpha).

    Section 5 of the paper, with alpha = 0.5. Proportions are drawn again until every client has
    at least `least` samples.
    """
    if not 0 < alpha < np.inf:
        raise UsageError(f"`dirichlet` is {alpha}, expected a positive number")
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise TrainingError(
            f"y is {labels.shape} of {labels.dtype}, expected one class number per sample",
            "split such data homogeneously or by a key",
        )
    _check_sizes(len(labels), clients, least)
    for _ in range(DRAWS):
        parts = _dirichlet(labels, clients, alpha, rng)
        if min(map(len, parts)) >= least:
            return _named(parts)
    raise TrainingError(
        f"{DRAWS} draws from Dir({alpha:g}) left some of {clients} clients with fewer than "
        f"{least} samples",
        "take a larger `dirichlet`, fewer `clients` or more data",
    )


def split_by_key(keys: Array) -> Parts:
    """Make a client of each distinct key (n,), such as the speaker of a line.

    >>> {name: rows.tolist() for name, rows in split_by_key(np.array(["b", "a", "b"])).items()}
    {'a': [1], 'b': [0, 2]}
    """
    if keys.ndim != 1 or keys.dtype.kind not in "iubUS":
        raise TrainingError(
            f"the key is {keys.shape} of {keys.dtype}, expected one number or name per sample"
        )
    values, members = np.unique(keys, return_inverse=True)
    order = np.argsort(members, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(members))[:-1])
    return dict(zip(_file_stems(values.tolist()), rows, strict=True))


def write_shards(
    folder: Path, data: Shard, parts: Parts, *, create: Callable[[Path], IO[bytes]]
) -> list[Path]:
    """Write each client's rows, ready for a model, to `folder/<client>.npz`.

    `create` opens the files; so the caller can give them their names once all are written.
    """
    paths = []
    for name, rows in parts.items():
        paths.append(folder / f"{name}.npz")
        write_npz(create(paths[-1]), _columns(data, rows))
    return paths


def _columns(data: Shard, rows: IntArray) -> dict[str, Column]:
    sample = data.preparation(data.x[:1])
    targets = data.targets
    return {
        "x": Column((len(rows), *sample.shape[1:]), sample.dtype.str, _prepared(data, rows)),
        "y": Column((len(rows), *targets.shape[1:]), targets.dtype.str, [targets[rows]]),
    }


def _prepared(data: Shard, rows: IntArray) -> Iterator[Array]:
    for start in range(0, len(rows), _BLOCK):
        yield data.preparation(data.x[rows[start : start + _BLOCK]])


def _dirichlet(
    labels: Array, clients: int, alpha: float, rng: np.random.Generator
) -> list[IntArray]:
    shares: list[list[IntArray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(members)
        for share, rows in zip(shares, np.split(members, cuts.astype(int)), strict=True):
            share.append(rows)
    return [np.concatenate(share) for share in shares]


def _named(parts: list[IntArray]) -> Parts:
    return {f"client-{number}": np.sort(rows) for number, rows in enumerate(parts, start=1)}


def _file_stems(values: Sequence[object]) -> list[str]:
    """Return a distinct file name for each value, on systems that ignore case too."""
    stems: list[str] = []
    taken: set[str] = set()
    for value in values:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        stem = name = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "client"
        count = 1
        while name.lower() in taken:
            count += 1
            name = f"{stem}-{count}"
        taken.add(name.lower())
        stems.append(name)
    return stems


def _check_sizes(samples: int, clients: int, least: int = 1) -> None:
    if clients < 1 or samples < clients * least:
        raise UsageError(
            f"{samples} samples cannot be split among {clients} clients of at least {least}"
        )
