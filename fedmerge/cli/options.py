"""The parameters that several commands take."""

from __future__ import annotations

from pathlib import Path

from fedmerge.cli.config import load_config
from fedmerge.cli.parameters import REQUIRED, argument, flag, option

_ANY_FILES = "Checkpoint files, folders of them, or quoted globs."

CLIENTS = argument("clients", list[Path], _ANY_FILES, readable=False)
MODELS = CLIENTS.replace(name="models")
FILES = CLIENTS.replace(name="files")
OPTIONAL_CLIENTS = argument("clients", list[Path] | None, _ANY_FILES, default=None, readable=False)
FILE = argument("file", Path, "A checkpoint file or a Hugging Face folder.", readable=False)
MERGED = argument("merged", Path, "A file that `match` or `retrain` wrote.", readable=False)

_OUT = "Output"
OUTPUT = option(
    "output",
    Path,
    _OUT,
    "Where to write: .pt, .pth, .bin, .ckpt or .safetensors.",
    "--output",
    "-o",
    metavar="FILE",
    default=REQUIRED,
)
MERGED_OUTPUT = option(
    "output",
    Path,
    _OUT,
    "Where to write: .pt, .pth, .bin, .ckpt or .safetensors (default: global.pt).",
    "--output",
    "-o",
    metavar="FILE",
    default=Path("global.pt"),
)
EXPORT_OUTPUT = option(
    "output", Path, _OUT, "Where to write.", "--output", "-o", metavar="FILE", default=REQUIRED
)
OPTIONAL_OUTPUT = option(
    "output",
    Path | None,
    _OUT,
    "Also write it as JSON to this file.",
    "--output",
    "-o",
    metavar="FILE.json",
)
FORCE = flag("force", _OUT, "Overwrite an existing output.")
DTYPE = option(
    "dtype",
    str | None,
    _OUT,
    "Write all floats as this dtype (default: as in the clients).",
    metavar="float32|float16|bfloat16|float64",
)
SHARD_SIZE = option(
    "shard_size",
    str | None,
    _OUT,
    "Write safetensors files of at most this size each, and their index.",
    metavar="2GB|500MB|1GiB",
)
DRY_RUN = flag("dry_run", _OUT, "Show groups, widths and sizes; match and write nothing.")

_FILE = "Reading files"
KEY = option(
    "key",
    str | None,
    _FILE,
    "Where in the file the state dict is, e.g. nets.G.",
    metavar="DOTTED.PATH",
)
WEIGHTS = option(
    "weights",
    str | None,
    _FILE,
    "Take the trained weights or their moving average, where a file has both.",
    metavar="raw|ema",
)
ALLOW_GLOBAL = option(
    "allow_global",
    list[str] | None,
    _FILE,
    "Let files name this class. Only for files that you trust; repeatable.",
    metavar="PACKAGE.CLASS",
)

_ARCH = "Architecture"
PLAN_FILE = option(
    "plan",
    str | None,
    _ARCH,
    "Which axis carries which units, as `fedmerge plan -o` writes it.",
    metavar="FILE",
)
MODEL = option(
    "model",
    str | None,
    _ARCH,
    "Your model: code that returns it, or a .pt2 or TorchScript file. This runs it.",
    metavar="FILE.py:NAME|PACKAGE.MODULE:NAME|FILE.pt2",
)
REQUIRED_MODEL = MODEL.replace(default=REQUIRED)
MODEL_ARG = option(
    "model_arg",
    list[str] | None,
    _ARCH,
    "An argument of the model's factory; repeatable.",
    metavar="NAME=VALUE",
)
INPUT_SHAPE = option(
    "input_shape",
    list[str] | None,
    _ARCH,
    "The model's input (default: the data's, else by its first layer); one each if several.",
    metavar="1,3,32,32",
)
INPUT_DTYPE = option(
    "input_dtype",
    list[str] | None,
    _ARCH,
    "The input's dtype, long draws tokens; one per input.",
    metavar="float32|long|…",
)
STATE = option(
    "state",
    list[str] | None,
    _ARCH,
    "Forward's argument I is output J of the call before, counted from 0; repeatable.",
    metavar="I:J",
)
FORMAT = option(
    "format", str | None, _OUT, "What to write (default: by the name).", metavar="pt2|onnx"
)
FLATTEN = option(
    "flatten",
    int | None,
    _ARCH,
    "Positions per channel (or steps) that a linear layer reads at once.",
    metavar="K",
)
ASSUME_CHAIN = flag(
    "assume_chain", _ARCH, "Take layers of equal width for a plain chain, without skips."
)
MATCH_BY_ORDER = flag("match_by_order", _ARCH, "Pair tensors in stored order where names differ.")
KEEP = option(
    "keep",
    list[str] | None,
    _ARCH,
    "Take these tensors from the first client unmatched; repeatable.",
    metavar="PATTERN",
)

_MATCH = "Matching"
METHOD = option(
    "method",
    str | None,
    _MATCH,
    "Match units, average element by element, or set clients side by side (default: fedma).",
    metavar="fedma|average|ensemble",
)
PRESET = option(
    "preset", str | None, _MATCH, "The settings of the paper's own code.", metavar="paper"
)
MATCH_THRESHOLD = option(
    "match_threshold",
    float | None,
    _MATCH,
    "Units merge above this cosine; 1 merges nothing (default: 0.5; on probes 0.95).",
    metavar="T",
)
MAX_GROWTH = option(
    "max_growth",
    str | None,
    _MATCH,
    "Most parameters, as a multiple of the widest client's; 1 never grows (default: 1.5).",
    metavar="X|none",
)
MAX_PARAMS = option(
    "max_params", int | None, _MATCH, "Most parameters, instead of --max-growth.", metavar="N"
)
GAMMA = option(
    "gamma", float | None, _MATCH, "How readily new units appear (default: 1).", metavar="G"
)
SIGMA = option(
    "sigma",
    float | None,
    _MATCH,
    "Variance of units around their mean, instead of the threshold.",
    metavar="V",
)
SIGMA0 = option(
    "sigma0", float | None, _MATCH, "Variance of the global units; goes with --sigma.", metavar="V"
)
SWEEPS = option(
    "sweeps",
    int | None,
    _MATCH,
    "Most sweeps over the clients per group (default: 20).",
    metavar="N",
)
REFINE = option(
    "refine",
    int | None,
    _MATCH,
    "Most passes that also compare outgoing and recurrent weights (default: 3).",
    metavar="N",
)
SEED = option(
    "seed",
    int | None,
    _MATCH,
    "Seed of the sweeps' order, and of training (default: 0).",
    metavar="N",
)
SOLVER = option(
    "solver",
    str | None,
    _MATCH,
    "Assignment solver (default: by the problem's shape).",
    metavar="auto|scipy|lapjv|lapsolver",
)
TIE_BREAKER = option(
    "tie_breaker",
    float | None,
    _MATCH,
    "Weight of outgoing weights in telling equal units apart (default: 0.001).",
    metavar="X",
)

_AVG = "Averaging"
CLIENT_WEIGHT = option(
    "client_weight",
    list[str] | None,
    _AVG,
    "How much a client counts (default: 1; its samples in fedavg, fedprox); repeatable.",
    metavar="NAME=W",
)
CLASS_COUNTS = option(
    "class_counts",
    str | None,
    _AVG,
    r'Average the last layer by class: {"name": \[count per class, …]} (retrain: of shards).',
    metavar="FILE.json",
)

_RUN = "Running"
DEVICE = option(
    "device",
    str,
    _RUN,
    "Where matrix products run (default: auto).",
    metavar="auto|cpu|cuda|mps",
    default="auto",
)
THREADS = option(
    "threads",
    int | None,
    _RUN,
    "CPU threads of products and solver (default: all cores).",
    metavar="N",
)
CONFIG = option(
    "config",
    Path | None,
    _RUN,
    "Options from a YAML or JSON file, or from a merge record to run it again.",
    metavar="FILE",
    callback=load_config,
    is_eager=True,
)
JSON = flag("json", _RUN, "Print one JSON object on stdout and nothing else.")
QUIET = flag("quiet", _RUN, "Print errors only.", "--quiet", "-q")
VERBOSE = flag("verbose", _RUN, "Say more on stderr.", "--verbose", "-v")

READING = (KEY, WEIGHTS, ALLOW_GLOBAL)
CODE_INPUTS = (INPUT_SHAPE, INPUT_DTYPE, STATE)
CODE = (MODEL_ARG, *CODE_INPUTS)
MATCHING = (
    *(GAMMA, SIGMA, SIGMA0, SWEEPS, REFINE, SEED, SOLVER, TIE_BREAKER, CLIENT_WEIGHT, CLASS_COUNTS),
    *(KEEP, PLAN_FILE),
)
SAYING = (JSON, QUIET, VERBOSE)
