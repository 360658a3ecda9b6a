"""The options of the commands, as typer types."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from fedmerge.cli.config import load_config


def option(panel: str, help_text: str, *names: str, **settings: Any) -> Any:
    """Return an option under a heading of the help text; a shell completes words of its metavar."""
    return typer.Option(
        *names,
        help=help_text,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=_completion(words_in(settings.get("metavar", ""))),
        **settings,
    )


def words_in(metavar: str) -> tuple[str, ...]:
    """Return the words that an option takes as they are; those in capitals stand for others.

    >>> words_in("auto|cpu"), words_in("classification|FILE.py:NAME"), words_in("N")
    (('auto', 'cpu'), ('classification',), ())
    """
    return tuple(word for word in metavar.split("|") if re.fullmatch(r"[a-z][a-z0-9-]*", word))


def _completion(words: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Return what a shell asks; None leaves it to offer files."""

    def starting(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return starting if words else None


def flag(panel: str, help_text: str, *names: str) -> Any:
    """Return an option that takes no value, and does not look as if it did."""
    return option(panel, help_text, *names, metavar="")


def _files(help_text: str) -> Any:
    return typer.Argument(help=help_text, show_default=False, readable=False)


_ANY_FILES = "Checkpoint files, folders of them, or quoted globs."

Clients: TypeAlias = Annotated[list[Path], _files(_ANY_FILES)]
OptionalClients: TypeAlias = Annotated[list[Path] | None, _files(_ANY_FILES)]
File: TypeAlias = Annotated[Path, _files("A checkpoint file or a Hugging Face folder.")]
Merged: TypeAlias = Annotated[Path, _files("A file that `match` or `retrain` wrote.")]

_OUT = "Output"
Output: TypeAlias = Annotated[
    Path,
    option(
        _OUT,
        "Where to write: .pt, .pth, .bin, .ckpt or .safetensors.",
        "--output",
        "-o",
        metavar="FILE",
    ),
]
MergedOutput: TypeAlias = Annotated[
    Path,
    option(
        _OUT,
        "Where to write: .pt, .pth, .bin, .ckpt or .safetensors (default: global.pt).",
        "--output",
        "-o",
        metavar="FILE",
    ),
]
ExportOutput: TypeAlias = Annotated[
    Path, option(_OUT, "Where to write.", "--output", "-o", metavar="FILE")
]
OptionalOutput: TypeAlias = Annotated[
    Path | None,
    option(_OUT, "Also write it as JSON to this file.", "--output", "-o", metavar="FILE.json"),
]
Force: TypeAlias = Annotated[bool, flag(_OUT, "Overwrite an existing output.", "--force")]
Dtype: TypeAlias = Annotated[
    str | None,
    option(
        _OUT,
        "Write all floats as this dtype (default: as in the clients).",
        metavar="float32|float16|bfloat16|float64",
    ),
]
ShardSize: TypeAlias = Annotated[
    str | None,
    option(
        _OUT,
        "Write safetensors files of at most this size each, and their index.",
        metavar="2GB|500MB|1GiB",
    ),
]
DryRun: TypeAlias = Annotated[
    bool, flag(_OUT, "Show groups, widths and sizes; match and write nothing.", "--dry-run")
]

_FILE = "Reading files"
Key: TypeAlias = Annotated[
    str | None,
    option(_FILE, "Where in the file the state dict is, e.g. nets.G.", metavar="DOTTED.PATH"),
]
Weights: TypeAlias = Annotated[
    str | None,
    option(
        _FILE,
        "Take the trained weights or their moving average, where a file has both.",
        metavar="raw|ema",
    ),
]
AllowGlobal: TypeAlias = Annotated[
    list[str] | None,
    option(
        _FILE,
        "Let files name this class. Only for files that you trust; repeatable.",
        metavar="PACKAGE.CLASS",
    ),
]

_ARCH = "Architecture"
PlanFile: TypeAlias = Annotated[
    str | None,
    option(
        _ARCH, "Which axis carries which units, as `fedmerge plan -o` writes it.", metavar="FILE"
    ),
]
_MODEL = option(
    _ARCH,
    "Your model: code that returns it, or a .pt2 or TorchScript file. This runs it.",
    metavar="FILE.py:NAME|PACKAGE.MODULE:NAME|FILE.pt2",
)
Model: TypeAlias = Annotated[str | None, _MODEL]
RequiredModel: TypeAlias = Annotated[str, _MODEL]
ModelArg: TypeAlias = Annotated[
    list[str] | None,
    option(_ARCH, "An argument of the model's factory; repeatable.", metavar="NAME=VALUE"),
]
InputShape: TypeAlias = Annotated[
    list[str] | None,
    option(
        _ARCH,
        "The model's input (default: the data's, else by its first layer); one each if several.",
        metavar="1,3,32,32",
    ),
]
InputDtype: TypeAlias = Annotated[
    list[str] | None,
    option(_ARCH, "The input's dtype, long draws tokens; one per input.", metavar="float32|long|…"),
]
State: TypeAlias = Annotated[
    list[str] | None,
    option(
        _ARCH,
        "Forward's argument I is output J of the call before, counted from 0; repeatable.",
        metavar="I:J",
    ),
]
Format: TypeAlias = Annotated[
    str | None, option(_OUT, "What to write (default: by the name).", metavar="pt2|onnx")
]
Flatten: TypeAlias = Annotated[
    int | None,
    option(
        _ARCH, "Positions per channel (or steps) that a linear layer reads at once.", metavar="K"
    ),
]
AssumeChain: TypeAlias = Annotated[
    bool,
    flag(_ARCH, "Take layers of equal width for a plain chain, without skips.", "--assume-chain"),
]
MatchByOrder: TypeAlias = Annotated[
    bool,
    flag(_ARCH, "Pair tensors in stored order where names differ.", "--match-by-order"),
]
Keep: TypeAlias = Annotated[
    list[str] | None,
    option(
        _ARCH,
        "Take these tensors from the first client unmatched; repeatable.",
        metavar="PATTERN",
    ),
]

_MATCH = "Matching"
Method: TypeAlias = Annotated[
    str | None,
    option(
        _MATCH,
        "Match units, average element by element, or set clients side by side (default: fedma).",
        metavar="fedma|average|ensemble",
    ),
]
Preset: TypeAlias = Annotated[
    str | None,
    option(_MATCH, "The settings of the paper's own code.", metavar="paper"),
]
MatchThreshold: TypeAlias = Annotated[
    float | None,
    option(
        _MATCH,
        "Units merge above this cosine; 1 merges nothing (default: 0.5; on probes 0.95).",
        metavar="T",
    ),
]
MaxGrowth: TypeAlias = Annotated[
    str | None,
    option(
        _MATCH,
        "Most parameters, as a multiple of the widest client's; 1 never grows (default: 1.5).",
        metavar="X|none",
    ),
]
MaxParams: TypeAlias = Annotated[
    int | None, option(_MATCH, "Most parameters, instead of --max-growth.", metavar="N")
]
Gamma: TypeAlias = Annotated[
    float | None,
    option(_MATCH, "How readily new units appear (default: 1).", metavar="G"),
]
Sigma: TypeAlias = Annotated[
    float | None,
    option(_MATCH, "Variance of units around their mean, instead of the threshold.", metavar="V"),
]
Sigma0: TypeAlias = Annotated[
    float | None,
    option(_MATCH, "Variance of the global units; goes with --sigma.", metavar="V"),
]
Sweeps: TypeAlias = Annotated[
    int | None,
    option(_MATCH, "Most sweeps over the clients per group (default: 20).", metavar="N"),
]
Refine: TypeAlias = Annotated[
    int | None,
    option(
        _MATCH,
        "Most passes that also compare outgoing and recurrent weights (default: 3).",
        metavar="N",
    ),
]
Seed: TypeAlias = Annotated[
    int | None,
    option(_MATCH, "Seed of the sweeps' order, and of training (default: 0).", metavar="N"),
]
Solver: TypeAlias = Annotated[
    str | None,
    option(
        _MATCH,
        "Assignment solver (default: by the problem's shape).",
        metavar="auto|scipy|lapjv|lapsolver",
    ),
]
TieBreaker: TypeAlias = Annotated[
    float | None,
    option(
        _MATCH,
        "Weight of outgoing weights in telling equal units apart (default: 0.001).",
        metavar="X",
    ),
]

_AVG = "Averaging"
ClientWeight: TypeAlias = Annotated[
    list[str] | None,
    option(
        _AVG,
        "How much a client counts (default: 1; its samples in fedavg, fedprox); repeatable.",
        metavar="NAME=W",
    ),
]
ClassCounts: TypeAlias = Annotated[
    str | None,
    option(
        _AVG,
        r'Average the last layer by class: {"name": \[count per class, …]} (retrain: of shards).',
        metavar="FILE.json",
    ),
]

_RUN = "Running"
Device: TypeAlias = Annotated[
    str,
    option(_RUN, "Where matrix products run (default: auto).", metavar="auto|cpu|cuda|mps"),
]
Threads: TypeAlias = Annotated[
    int | None,
    option(_RUN, "CPU threads of products and solver (default: all cores).", metavar="N"),
]
Config: TypeAlias = Annotated[
    Path | None,
    option(
        _RUN,
        "Options from a YAML or JSON file, or from a merge record to run it again.",
        metavar="FILE",
        callback=load_config,
        is_eager=True,
    ),
]
Json: TypeAlias = Annotated[
    bool, flag(_RUN, "Print one JSON object on stdout and nothing else.", "--json")
]
Quiet: TypeAlias = Annotated[bool, flag(_RUN, "Print errors only.", "--quiet", "-q")]
Verbose: TypeAlias = Annotated[bool, flag(_RUN, "Say more on stderr.", "--verbose", "-v")]
