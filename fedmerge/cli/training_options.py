"""The parameters of commands that train or evaluate."""

from __future__ import annotations

from pathlib import Path

from fedmerge.cli.parameters import REQUIRED, flag, option

_DATA = "Data"
SHARDS = option(
    "shards",
    list[str],
    _DATA,
    "Each client's samples x and targets y: a folder, files (repeatable), or your function.",
    metavar="FOLDER|FILE|FILE.py:NAME",
    default=REQUIRED,
)
EVALUATION_DATA = option(
    "data",
    str | None,
    _DATA,
    "Evaluate every whole global model on x and y (or x_test and y_test).",
    metavar="FILE|FILE.py:NAME",
)
TASK = option(
    "task",
    str | None,
    _DATA,
    "What is learnt (default: classification); your own has loss and metrics.",
    metavar="classification|language-model|FILE.py:NAME",
)
NORMALIZE = option(
    "normalize",
    str | None,
    _DATA,
    "Mean and deviation of x/255, for images of bytes.",
    metavar="MEAN,STD",
)
CHANNELS_LAST = flag("channels_last", _DATA, "Images are stored with their channels last.")

_ROUNDS = "Rounds"
RETRAIN_METHOD = option(
    "method",
    str | None,
    _ROUNDS,
    "Match layer by layer, or average whole models (default: fedma).",
    metavar="fedma|fedavg|fedprox",
)
PASSES = option(
    "passes",
    int | None,
    _ROUNDS,
    "How often fedma goes through all layers (default: 1); more is with communication.",
    metavar="N",
)
ROUNDS = option(
    "rounds", int | None, _ROUNDS, "Rounds of fedavg and fedprox (default: 10).", metavar="N"
)
MU = option(
    "mu", float | None, _ROUNDS, "Proximal weight of fedprox (default: 0.001).", metavar="X"
)
INIT = option(
    "init",
    str | None,
    _ROUNDS,
    "How models begin without checkpoints (default: independent; shared for fedavg, fedprox).",
    metavar="independent|shared",
)
INIT_EPOCHS = option(
    "init_epochs",
    int | None,
    _ROUNDS,
    "Epochs before the first round, without checkpoints (default: --epochs).",
    metavar="N",
)

_TRAIN = "Local training"
EPOCHS = option("epochs", int | None, _TRAIN, "Local epochs per round (default: 20).", metavar="N")
BATCH_SIZE = option(
    "batch_size", int | None, _TRAIN, "Samples per step (default: 32).", metavar="N"
)
OPTIMIZER = option("optimizer", str | None, _TRAIN, "Default: sgd.", metavar="sgd|adam")
LEARNING_RATE = option(
    "learning_rate", float | None, _TRAIN, "Default: 0.01; 0.8 for language models.", metavar="X"
)
MOMENTUM = option("momentum", float | None, _TRAIN, "Of sgd (default: 0.9).")
WEIGHT_DECAY = option(
    "weight_decay", float | None, _TRAIN, "While nothing is frozen (default: 1e-4).", metavar="X"
)
CLIP_NORM = option(
    "clip_norm", float | None, _TRAIN, "Largest norm of a step's gradient.", metavar="X"
)
MIXED_PRECISION = flag(
    "mixed_precision", _TRAIN, "Half-precision products where the device has them."
)
PARTIAL_WEIGHT_DECAY = option(
    "partial_weight_decay",
    float | None,
    _TRAIN,
    "While matched layers are frozen (default: 0).",
    metavar="X",
)
LAST_RATE_FACTOR = option(
    "last_rate_factor",
    float | None,
    _TRAIN,
    "Rate of the last layer ÷ rate (default: 0.1; 1 for language models).",
)
LAST_EPOCHS_FACTOR = option(
    "last_epochs_factor",
    int | None,
    _TRAIN,
    "Epochs of the last layer ÷ epochs (default: 3).",
    metavar="N",
)
LAST_WEIGHT_DECAY = option(
    "last_weight_decay", float | None, _TRAIN, "Of the last layer (default: 1e-4).", metavar="X"
)

_CLIENTS = "Clients and state"
ENGINE = option(
    "engine",
    str | None,
    _CLIENTS,
    "Train clients one by one here, in processes, or over a Ray cluster (default: local).",
    metavar="local|processes|ray",
)
WORKERS = option(
    "workers",
    int | None,
    _CLIENTS,
    "Processes (default: one per GPU, else as the cores allow).",
    metavar="N",
)
ADDRESS = option(
    "address",
    str | None,
    _CLIENTS,
    "The Ray cluster (default: one of its own here); auto: the one that Ray finds.",
    metavar="HOST:PORT|auto",
)
CPUS_PER_CLIENT = option(
    "cpus_per_client",
    float | None,
    _CLIENTS,
    "CPUs of one client on Ray (default: --threads-per-client).",
    metavar="X",
)
GPUS_PER_CLIENT = option(
    "gpus_per_client",
    float | None,
    _CLIENTS,
    "GPUs of one client on Ray (default: 0).",
    metavar="X",
)
TRAINING_DEVICE = option(
    "device",
    str,
    _CLIENTS,
    "Where clients train and matching runs (default: auto).",
    metavar="auto|cpu|cuda|mps|cuda:0,cuda:1",
    default="auto",
)
THREADS_PER_CLIENT = option(
    "threads_per_client",
    int | None,
    _CLIENTS,
    "CPU threads of one client (default: 1).",
    metavar="N",
)
CLIENT_TIMEOUT = option(
    "client_timeout",
    float | None,
    _CLIENTS,
    "Longest training of one client, in seconds.",
    metavar="SECONDS",
)
RETRIES = option(
    "retries",
    int | None,
    _CLIENTS,
    "Further tries of a client that fails (default: 1).",
    metavar="N",
)
MIN_CLIENTS = option(
    "min_clients",
    int | None,
    _CLIENTS,
    "Fewer clients than this in a round end the run (default: 1).",
    metavar="N",
)
WORK_DIR = option(
    "work_dir",
    Path | None,
    _CLIENTS,
    "Where the state is kept (default: the output's name + .work).",
    metavar="FOLDER",
)
RESUME = flag("resume", _CLIENTS, "Go on where a stopped run was.")
EVENTS = option(
    "events", Path | None, _CLIENTS, "Write one JSON line per event.", metavar="FILE.jsonl"
)
RETRAIN_DRY_RUN = flag(
    "dry_run", "Output", "Show rounds, widths and bytes; train and write nothing."
)

PIXELS = (NORMALIZE, CHANNELS_LAST)
ROUNDS_OF = (RETRAIN_METHOD, PASSES, ROUNDS, MU, INIT, INIT_EPOCHS)
TRAINING = (
    *(EPOCHS, BATCH_SIZE, OPTIMIZER, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, CLIP_NORM),
    *(MIXED_PRECISION, PARTIAL_WEIGHT_DECAY),
    *(LAST_RATE_FACTOR, LAST_EPOCHS_FACTOR, LAST_WEIGHT_DECAY),
)
PLACES = (ENGINE, WORKERS, ADDRESS, CPUS_PER_CLIENT, GPUS_PER_CLIENT, TRAINING_DEVICE)
FAILURES = (THREADS_PER_CLIENT, CLIENT_TIMEOUT, RETRIES, MIN_CLIENTS, WORK_DIR, RESUME, EVENTS)
