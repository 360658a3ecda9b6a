"""The options of commands that evaluate models or split data, as typer types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from fedmerge.cli.options import flag, option

_DATA = "Data"
RequiredData: TypeAlias = Annotated[
    str,
    option(
        _DATA,
        "Samples and targets: x and y, or x_test and y_test; or your function.",
        metavar="FILE|FILE.py:NAME",
    ),
]
EvaluationBatch: TypeAlias = Annotated[
    int | None,
    option(_DATA, "Samples at a time (default: 256); changes no result.", metavar="N"),
]
Global: TypeAlias = Annotated[
    list[Path] | None,
    option(_DATA, "A merged file to compare too; repeatable.", "--global", metavar="FILE"),
]

DataSet: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="A file with x and y, or x_train and y_train: .npz, .pt or .safetensors.",
        show_default=False,
        metavar="DATA",
    ),
]
_SPLIT = "Split"
NumberOfClients: TypeAlias = Annotated[
    int | None, option(_SPLIT, "How many shards, unless --by names them.", metavar="N")
]
Dirichlet: TypeAlias = Annotated[
    float | None,
    option(
        _SPLIT, "Skewed: every class by shares from Dir(ALPHA); 0.5 in the paper.", metavar="ALPHA"
    ),
]
Homogeneous: TypeAlias = Annotated[
    bool, flag(_SPLIT, "Evenly: every client gets as many of each class.", "--homogeneous")
]
By: TypeAlias = Annotated[
    str | None,
    option(_SPLIT, "Naturally: one client per value of this further array.", metavar="COLUMN"),
]
MinSamples: TypeAlias = Annotated[
    int | None,
    option(
        _SPLIT,
        "Fewest samples of a client (default: 1); --by leaves smaller ones out.",
        metavar="N",
    ),
]
SplitSeed: TypeAlias = Annotated[
    int | None, option(_SPLIT, "Seed of the split (default: 0).", metavar="N")
]
ShardFolder: TypeAlias = Annotated[
    Path,
    option("Output", "Folder for the shards (default: shards).", "--output", "-o"),
]
