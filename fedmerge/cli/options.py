"""The table of options: those of the option dataclasses, and those of the command line alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmerge.cli.command_line import Option
from fedmerge.federated.options import PartitionOptions, RetrainOptions, Running
from fedmerge.merging.options import EvaluationOptions, MatchOptions
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.option_fields import Described, options_of
from fedmerge.values.run_settings import RetryPolicy, TrainSettings

_KINDS: Mapping[str, Any] = {  # of a field → of what is typed; text if it is not here
    "int": int,
    "float": float,
    "bool": bool,
    "tuple[str, ...]": list[str],
    "Mapping[str, float]": list[str],
}


def _described(kind: type) -> Iterator[Option]:
    """Yield the options that an option dataclass describes."""
    for own in options_of(kind):
        yield _of_field(own)


def _of_field(own: Described) -> Option:
    kind = _KINDS.get(own.annotation, str)
    return Option(own.name, own.help, own.values, own.default, kind)


_FILES = "Checkpoint files, folders of them, or quoted globs"
_MODEL = Option(
    "model",
    "Your model: code that returns it, or a .pt2 or TorchScript file; this runs it",
    "FILE.py:NAME|PACKAGE.MODULE:NAME|FILE.pt2|LIBRARY:NAME",
)
_DATA = Option(
    "data",
    "Samples and targets: x and y, or x_test and y_test; or your function",
    "FILE|FILE.py:NAME",
    is_required=True,
)
_OUTPUT = Option(
    "output",
    "Where to write: .pt, .pth, .bin, .safetensors, or .ckpt of Lightning clients",
    "FILE",
    kind=Path,
    flags=("-o", "--output"),
    is_required=True,
)
_CLIENTS = Option("clients", _FILES, "CLIENT", kind=list[Path], is_argument=True, is_required=True)


def _also(option: Option, **changes: Any) -> Option:
    return replace(option, is_required=False, **changes)


_EVERYWHERE = (
    _CLIENTS,
    replace(_CLIENTS, name="models", values="FILE"),
    replace(_CLIENTS, name="files", values="FILE"),
    Option(
        "file",
        "A checkpoint file or a Hugging Face folder",
        "FILE",
        kind=Path,
        is_argument=True,
        is_required=True,
    ),
    Option(
        "merged",
        "A file that `match` or `retrain` wrote",
        "MERGED",
        kind=Path,
        is_argument=True,
        is_required=True,
    ),
    _OUTPUT,
    Option("force", "Overwrite an existing output", kind=bool),
    Option(
        "shard_size",
        "Write safetensors files of at most this size each (2GB, 500MB, 1GiB), and their index",
        "SIZE",
        "one file",
    ),
    Option("report", "Also write a page about the result", "FILE.html", kind=Path),
    Option(
        "base",
        "The model that clients were fine-tuned from: merge what they changed",
        "FILE|FOLDER",
        kind=Path,
    ),
    Option("dry_run", "Show groups, widths and sizes; match and write nothing", kind=bool),
    Option(
        "plan",
        "Which axis carries which units, as `fedmerge plan -o` writes it",
        "FILE",
        "from the model's code, else from names and shapes",
    ),
    _MODEL,
    Option("model_arg", "An argument of that code; repeatable", "NAME=VALUE", kind=list[str]),
    Option(
        "input_shape",
        "The model's input with its batch, e.g. 1,3,32,32; repeatable for several inputs",
        "SIZES",
        "as the data, else by the first layer",
        kind=list[str],
    ),
    Option(
        "input_dtype",
        "The input's dtype, long draws tokens; repeatable for several inputs",
        "DTYPE",
        "by the first layer",
        kind=list[str],
    ),
    Option(
        "numbers",
        "Numbers that the model takes out of its data: refused where they can't be followed, "
        "or taken on trust",
        "followed|trusted",
        "followed",
    ),
    Option(
        "state",
        "Forward's argument I is output J of the call before, counted from 0; repeatable",
        "I:J",
        kind=list[str],
    ),
    _DATA,
    Option(
        "normalize",
        "Mean and deviation of x/255, for images of bytes; of colours all means come first",
        "MEAN,STD",
        "bytes are refused",
    ),
    Option("channels_last", "Images are stored with their channels last", kind=bool),
    Option("require", "Write nothing unless the merge is expected to beat every client", "better"),
    Option("frontier", "Also show what merges of other sizes would give", kind=bool),
    Option("frontier_plot", "Draw that, too", "FILE.svg|FILE.png", kind=Path),
    Option(
        "image",
        "Show what matched units see in this picture, .npy array or sample of a shard",
        "FILE",
        kind=Path,
    ),
    Option("image_index", "Which sample of that shard", "N", "0", kind=int),
    Option(
        "image_group",
        "Whose units look; repeatable",
        "GROUP",
        "the first and the last convolution's",
        kind=list[str],
    ),
    Option("device", "Where models and products run", "auto|cpu|cuda|mps", "auto", start="auto"),
    Option("threads", "CPU threads of products and solver", "N", "all cores", kind=int),
    Option(
        "config",
        "Options from a YAML or JSON file, or from a merge record to run it again",
        "FILE",
        kind=Path,
    ),
    Option(
        "set",
        "Set a dial that few need; --help-all lists them; repeatable",
        "NAME=VALUE",
        kind=list[str],
    ),
    Option("json", "Print one JSON object on stdout and nothing else", kind=bool),
    Option("quiet", "Print errors only", kind=bool, flags=("-q", "--quiet")),
    Option("verbose", "Say more on stderr", kind=bool, flags=("-v", "--verbose")),
    Option("help", "Show what most need", kind=bool, flags=("-h", "--help")),
    Option("help_all", "Show all options", kind=bool),
)
_MERGED_OUTPUT = _also(_OUTPUT, default="global.pt", start=Path("global.pt"))
_OPTIONAL_CLIENTS = _also(_CLIENTS)
_BY_COMMAND: Mapping[str, Sequence[Option]] = {  # what differs in one command from the others
    "match": (
        replace(
            _MERGED_OUTPUT,
            help=f"{_OUTPUT.help}; else a folder, if the clients are such or LoRA adapters",
            values="FILE|FOLDER",
        ),
        Option("normalize", "Mean and deviation of x/255, where images hold bytes", "MEAN,STD"),
    ),
    "retrain": (
        *(_OPTIONAL_CLIENTS, _MERGED_OUTPUT, replace(_MODEL, is_required=True)),
        *(o for k in (RetrainOptions, TrainSettings, Running, RetryPolicy) for o in _described(k)),
        Option(
            "shards",
            "Each client's samples and targets: files, a folder of them or of folders, a path with "
            "{client} in it, or your function; repeatable",
            "FOLDER|FILE|FILE.py:NAME",
            kind=list[str],
            is_required=True,
        ),
        _also(_DATA, help="Evaluate every whole global model on x and y (or x_test and y_test)"),
        Option(
            "client_names",
            "The clients' names, where there are no checkpoints and shards don't tell them",
            "NAME,NAME,…",
        ),
        Option("dry_run", "Show rounds, widths and bytes; train and write nothing", kind=bool),
        Option(
            "work_dir",
            "Where the state is kept",
            "FOLDER",
            "the output's name + .work",
            kind=Path,
        ),
        Option("resume", "Go on where a stopped run was", kind=bool),
        Option(
            "logger",
            "Tell your class (log(event), close()) of every event, or write for TensorBoard",
            "FILE.py:CLASS|tensorboard",
        ),
        Option("events", "Write one line of JSON per event", "FILE.jsonl", kind=Path),
    ),
    "demo": (
        Option(
            "folder",
            "Where the demo's files go",
            "FOLDER",
            "demo-output",
            Path,
            start=Path("demo-output"),
            is_argument=True,
        ),
    ),
    "eval": (replace(_MODEL, is_required=True),),
    "compare": (
        replace(_MODEL, is_required=True),
        Option(
            "merged",
            "A merged file to compare too; repeatable",
            "FILE",
            kind=list[Path],
            flags=("--global",),
        ),
    ),
    "verify": (
        _OPTIONAL_CLIENTS,
        Option("base", "The base model, if the merge was given one", "FILE|FOLDER", kind=Path),
    ),
    "report": (
        _OPTIONAL_CLIENTS,
        _also(
            _OUTPUT,
            help="Where to write the page",
            values="FILE.html",
            default="report.html",
            start=Path("report.html"),
        ),
        _also(
            _DATA,
            help="Measure merge, clients, average and ensemble on this: x and y; or your function",
        ),
        Option(
            "work_dir",
            "Where a run in rounds kept its state",
            "FOLDER",
            "the merged file's name + .work",
            kind=Path,
        ),
        Option(
            "baseline",
            "Another file that `retrain` wrote, to draw its rounds too; repeatable",
            "FILE",
            kind=list[Path],
        ),
    ),
    "plan": (
        _also(_OUTPUT, help="Also write it as JSON to this file", values="FILE.json"),
        Option("graph", "Also draw it", "FILE.svg|FILE.png", kind=Path),
    ),
    "partition": (
        Option(
            "data",
            "A file with x and y, or x_train and y_train: .npz, .pt or .safetensors",
            "DATA",
            is_argument=True,
            is_required=True,
        ),
        _also(
            _OUTPUT,
            help="Folder for the shards",
            values="FOLDER",
            default="shards",
            start=Path("shards"),
        ),
        *_described(PartitionOptions),
    ),
    "convert": (replace(_OUTPUT, help="Where to write: .pt, .pth, .bin, .ckpt or .safetensors"),),
    "export": (
        replace(_MODEL, is_required=True),
        replace(_OUTPUT, help="Where to write"),
        Option("format", "What to write", "pt2|onnx", "by the name"),
    ),
}
_SHARED = {
    option.name: option
    for option in (
        *(o for kind in (MatchOptions, ProbeOptions, EvaluationOptions) for o in _described(kind)),
        *_EVERYWHERE,
    )
}


def known_options(command: str) -> Mapping[str, Option]:
    """Return what a command means by every option's name; those of others, as they mean them."""
    by_others = {option.name: option for options in _BY_COMMAND.values() for option in options}
    return by_others | _SHARED | {option.name: option for option in _BY_COMMAND.get(command, ())}
