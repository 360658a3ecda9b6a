"""The table of commands: their examples, and the options that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedmerge.cli.command_line import Command
from fedmerge.cli.options import known_options

INTRODUCTION = """\
fedmerge merges separately trained PyTorch checkpoints of one architecture into one model.

  See it work on small nets that it trains itself:
    fedmerge demo
  Merge files, from names and shapes alone or with your model's code:
    fedmerge match a.pt b.pt -o global.pt
    fedmerge match a.pt b.pt --model net.py:Net -o global.pt
  Measure the result next to its clients, their average and their ensemble:
    fedmerge compare a.pt b.pt --global global.pt --model net.py:Net --data test.npz

All commands: fedmerge --help. Options and examples of one: fedmerge match --help."""

_MERGE, _MEASURE, _LOOK, _WRITE = "Merge", "Measure and show", "Look into files", "Files and data"
_SAID = ("json", "quiet", "verbose", "help", "help_all")
_CODE = ("model", "model_arg", "input_shape")
_FEEDING = ("input_dtype", "numbers", "state")
_IMAGES = ("image", "image_index", "image_group")
_MATCHING = (
    *(
        "match_threshold",
        "preset",
        "client_weight",
        "gamma",
        "sigma",
        "sigma0",
        "sweeps",
        "refine",
        "solver",
    ),
    "tie_breaker",
)
_PROBES = ("probe", "probe_count", "probe_mean", "probe_std", "merge_units", "lead")


_TABLE = (
    Command(
        "match",
        _MERGE,
        "Merge checkpoints into one model: from the files alone, or with the model's code.",
        (
            "fedmerge match a.pt b.pt -o global.pt",
            "fedmerge match a.pt b.pt --model net.py:Net",
            "fedmerge match clients/ --max-growth 1 -o global.safetensors",
            "fedmerge match a.pt b.pt --model net.py:Net --probe-data x.npz --frontier",
            "fedmerge match run-a/ run-b/ -o merged/",
        ),
        ("clients",),
        {
            "Output": ("output", "force", "dtype", "report", "dry_run"),
            "Matching": ("method", "base", "max_growth", "class_counts", "keep", "seed"),
            "Architecture": (*_CODE, "plan", "assume_chain"),
            "Probes (with --model or a .pt2)": ("probe_data", "effort", "require", "frontier"),
            "Reading files": ("key", "allow_global"),
            "Running": ("device", "config", "set", *_SAID),
        },
        {
            "Output": ("shard_size", *_IMAGES),
            "Matching": ("max_params", "scale", "regularisation", *_MATCHING),
            "Architecture": (*_FEEDING, "flatten", "match_by_order"),
            "Probes (with --model or a .pt2)": (
                *(*_PROBES, "augment", "drop_outliers", "normalize", "channels_last"),
                "frontier_plot",
            ),
            "Reading files": ("weights",),
            "Running": ("threads",),
        },
        (
            *("output", "force", "report", "dry_run", "max_growth", "base"),
            *("model", "input_shape", "probe_data", "effort", "require", "config"),
            *("json", "help", "help_all"),
        ),
    ),
    Command(
        "retrain",
        _MERGE,
        "Train and match clients layer by layer on their own data, in rounds.",
        (
            "fedmerge retrain --shards data/ --model net.py:Net --data test.npz --passes 2",
            "fedmerge retrain a.pt b.pt --shards data/ --model net.py:Net --epochs 5",
            "fedmerge retrain --shards data/ --model net.py:Net --method fedavg",
        ),
        ("clients",),
        {
            "Data": (
                *("shards", "client_names", "x_key", "y_key", "data", "held_out", "task"),
                *("normalize", "no_class_counts"),
            ),
            "Output": ("output", "force", "dtype", "report", "dry_run"),
            "Rounds": ("method", "passes", "rounds"),
            "Local training": ("epochs", "batch_size", "optimizer", "learning_rate"),
            "Clients and state": (
                *("engine", "workers", "address", "device", "retries"),
                *("work_dir", "resume", "events"),
            ),
            "Matching": (*("max_growth", "class_counts", "keep", "seed"),),
            "Architecture": (*_CODE, "plan"),
            "Reading files": ("key", "allow_global"),
            "Running": ("config", "set", *_SAID),
        },
        {
            "Data": ("channels_last", "classes"),
            "Output": ("shard_size", *_IMAGES),
            "Rounds": ("mu", "weight_rate", "init", "init_epochs", "probe_data"),
            "Local training": (
                *("optimizer_args", "scheduler", "scheduler_args", "accumulate", "patience"),
                *("momentum", "weight_decay", "clip_norm", "mixed_precision"),
                *("partial_weight_decay", "last_rate_factor", "last_epochs_factor"),
                "last_weight_decay",
            ),
            "Clients and state": (
                *("cpus_per_client", "gpus_per_client", "threads_per_client"),
                *("client_timeout", "min_clients", "logger"),
            ),
            "Matching": _MATCHING,
            "Architecture": (*_FEEDING, "match_by_order"),
            "Reading files": ("weights",),
            "Running": ("threads",),
        },
        (
            *("shards", "data", "output", "report", "dry_run", "method", "passes"),
            *("rounds", "epochs", "engine", "resume", "max_growth", "model", "json"),
            *("help", "help_all"),
        ),
    ),
    Command(
        "demo",
        _MERGE,
        "Train small clients on skewed parts of a data set, merge and compare them.",
        ("fedmerge demo", "fedmerge demo somewhere-else"),
        ("folder",),
        {"Running": _SAID},
    ),
    Command(
        "eval",
        _MEASURE,
        "Measure models on data: loss, accuracy, or what your own task measures.",
        (
            "fedmerge eval global.pt --model net.py:Net --data test.npz",
            "fedmerge eval g.pt --model net.py:Net --data text.npz --task language-model",
        ),
        ("models",),
        {
            "Data": ("data", "task", "normalize", "channels_last", "batch_size"),
            "Architecture": ("model", "model_arg"),
            "Reading files": ("key", "weights", "allow_global"),
            "Running": ("device", "threads", *_SAID),
        },
        usual=("data", "task", "normalize", "model", "device", "json", "help", "help_all"),
    ),
    Command(
        "compare",
        _MEASURE,
        "Measure clients, their average, ensemble and match, and merged files, in one table.",
        (
            "fedmerge compare a.pt b.pt --model net.py:Net --data test.npz",
            "fedmerge compare clients/ --global g.pt --model net.py:Net --data test.npz",
        ),
        ("clients",),
        {
            "Data": ("data", "merged", "task", "normalize", "channels_last", "batch_size"),
            "Matching": (*("max_growth", "class_counts", "keep", "seed"),),
            "Architecture": (*_CODE, "plan"),
            "Probes (with --model or a .pt2)": ("probe_data", "effort"),
            "Reading files": ("key", "allow_global"),
            "Running": ("dtype", "device", "config", "set", *_SAID),
        },
        {
            "Matching": ("method", "regularisation", "max_params", *_MATCHING),
            "Architecture": (*_FEEDING, "match_by_order"),
            "Probes (with --model or a .pt2)": (*_PROBES, "augment"),
            "Reading files": ("weights",),
            "Running": ("threads",),
        },
        (
            *("data", "merged", "task", "normalize", "max_growth", "class_counts", "model"),
            *("probe_data", "json", "help", "help_all"),
        ),
    ),
    Command(
        "verify",
        _MEASURE,
        "Check a merged file against its record and, if given, its clients.",
        (
            "fedmerge verify global.pt",
            "fedmerge verify global.pt a.pt b.pt --model net.py:Net",
        ),
        ("merged", "clients"),
        {
            "Architecture": _CODE,
            "Reading files": ("base", "allow_global"),
            "Running": ("set", *_SAID),
        },
        {"Architecture": _FEEDING},
        ("model", "input_shape", "json", "help", "help_all"),
    ),
    Command(
        "report",
        _MEASURE,
        "Write a page about a merged file: what it is of, how good, and what matched what.",
        (
            "fedmerge report global.pt -o report.html",
            "fedmerge report global.pt --model net.py:Net --data test.npz -o report.html",
            "fedmerge report global.pt --model net.py:Net --image digit.png -o report.html",
        ),
        ("merged", "clients"),
        {
            "Output": ("output", "force"),
            "Report": (
                *("data", "task", "normalize", "channels_last", "batch_size"),
                *(*_IMAGES, "baseline", "work_dir"),
            ),
            "Architecture": _CODE,
            "Reading files": ("allow_global",),
            "Running": ("device", "threads", "set", *_SAID),
        },
        {"Architecture": _FEEDING},
        (
            *("output", "force", "data", "image", "normalize", "baseline", "model"),
            *("input_shape", "json", "help", "help_all"),
        ),
    ),
    Command(
        "plan",
        _LOOK,
        "Show which axes of which tensors carry the same hidden units.",
        (
            "fedmerge plan a.pt",
            "fedmerge plan a.pt --model net.py:Net --graph plan.svg",
            "fedmerge plan a.pt --assume-chain -o plan.json",
        ),
        ("clients",),
        {
            "Output": ("output", "graph", "force"),
            "Architecture": (*_CODE, "plan", "keep", "assume_chain"),
            "Reading files": ("key", "allow_global"),
            "Running": ("config", "set", *_SAID),
        },
        {
            "Architecture": (*_FEEDING, "flatten", "match_by_order"),
            "Reading files": ("weights",),
        },
        (
            *("output", "graph", "force", "model", "input_shape", "keep", "assume_chain"),
            *("json", "verbose", "help", "help_all"),
        ),
    ),
    Command(
        "inspect",
        _LOOK,
        "Show what is in files, what of it is understood, and how they differ.",
        ("fedmerge inspect a.pt b.pt", "fedmerge inspect checkpoint.ckpt --key nets.G"),
        ("files",),
        {
            "Architecture": ("flatten", "assume_chain"),
            "Reading files": ("key", "weights", "allow_global"),
            "Running": _SAID,
        },
    ),
    Command(
        "partition",
        _WRITE,
        "Split a data set into one ready shard per client: evenly, skewed, or by a column.",
        (
            "fedmerge partition data.npz --clients 4 --dirichlet 0.5 -o shards",
            "fedmerge partition data.npz --by writer --min-samples 20 -o shards",
        ),
        ("data",),
        {
            "Output": ("output", "force"),
            "Split": ("clients", "dirichlet", "homogeneous", "by", "min_samples", "seed"),
            "Data": ("normalize", "channels_last"),
            "Running": _SAID,
        },
    ),
    Command(
        "convert",
        _WRITE,
        "Write the state dict found in a file as a plain one.",
        (
            "fedmerge convert checkpoint.ckpt -o weights.safetensors",
            "fedmerge convert a.pt --dtype bfloat16 -o a-half.pt",
        ),
        ("file",),
        {
            "Output": ("output", "force", "dtype", "shard_size"),
            "Reading files": ("key", "weights", "allow_global"),
            "Running": _SAID,
        },
    ),
    Command(
        "export",
        _WRITE,
        "Write a merged model as a file that runs without fedmerge.",
        (
            "fedmerge export g.pt --model net.py:Net --input-shape 1,3,32,32 -o g.pt2",
            "fedmerge export g.pt --model net.py:Net --input-shape 1,3,32,32 -o g.onnx",
        ),
        ("merged",),
        {
            "Output": ("output", "format", "force"),
            "Architecture": _CODE,
            "Running": ("set", *_SAID),
        },
        {"Architecture": _FEEDING},
    ),
)

_NAMES = {name for row in _TABLE for name in row.names}


def _with_options(row: Command) -> Command:
    known = known_options(row.name)
    return replace(row, known={name: known[name] for name in _NAMES})


COMMANDS: Mapping[str, Command] = {row.name: _with_options(row) for row in _TABLE}
