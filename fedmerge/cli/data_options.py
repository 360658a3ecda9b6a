"""The parameters of commands that evaluate models or split data."""

from __future__ import annotations

from pathlib import Path

from fedmerge.cli.parameters import REQUIRED, argument, flag, option

_DATA = "Data"
REQUIRED_DATA = option(
    "data",
    str,
    _DATA,
    "Samples and targets: x and y, or x_test and y_test; or your function.",
    metavar="FILE|FILE.py:NAME",
    default=REQUIRED,
)
EVALUATION_BATCH = option(
    "batch_size",
    int | None,
    _DATA,
    "Samples at a time (default: 256); changes no result.",
    metavar="N",
)
GLOBAL = option(
    "merged",
    list[Path] | None,
    _DATA,
    "A merged file to compare too; repeatable.",
    "--global",
    metavar="FILE",
)

DATA_SET = argument(
    "data",
    str,
    "A file with x and y, or x_train and y_train: .npz, .pt or .safetensors.",
    metavar="DATA",
)
_SPLIT = "Split"
NUMBER_OF_CLIENTS = option(
    "clients", int | None, _SPLIT, "How many shards, unless --by names them.", metavar="N"
)
DIRICHLET = option(
    "dirichlet",
    float | None,
    _SPLIT,
    "Skewed: every class by shares from Dir(ALPHA); 0.5 in the paper.",
    metavar="ALPHA",
)
HOMOGENEOUS = flag("homogeneous", _SPLIT, "Evenly: every client gets as many of each class.")
BY = option(
    "by",
    str | None,
    _SPLIT,
    "Naturally: one client per value of this further array.",
    metavar="COLUMN",
)
MIN_SAMPLES = option(
    "min_samples",
    int | None,
    _SPLIT,
    "Fewest samples of a client (default: 1); --by leaves smaller ones out.",
    metavar="N",
)
SPLIT_SEED = option("seed", int | None, _SPLIT, "Seed of the split (default: 0).", metavar="N")
SHARD_FOLDER = option(
    "output",
    Path,
    "Output",
    "Folder for the shards (default: shards).",
    "--output",
    "-o",
    default=Path("shards"),
)

SPLIT = (NUMBER_OF_CLIENTS, DIRICHLET, HOMOGENEOUS, BY, MIN_SAMPLES, SPLIT_SEED)
