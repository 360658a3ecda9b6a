"""The options of commands that train or evaluate, as typer types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from fedmerge.cli.options import flag, option

_DATA = "Data"
Shards: TypeAlias = Annotated[
    list[str],
    option(
        _DATA,
        "Each client's samples x and targets y: a folder, files (repeatable), or your function.",
        metavar="FOLDER|FILE|FILE.py:NAME",
    ),
]
EvaluationData: TypeAlias = Annotated[
    str | None,
    option(
        _DATA,
        "Evaluate every whole global model on x and y (or x_test and y_test).",
        metavar="FILE|FILE.py:NAME",
    ),
]
Task: TypeAlias = Annotated[
    str | None,
    option(
        _DATA,
        "What is learnt (default: classification); your own has loss and metrics.",
        metavar="classification|language-model|FILE.py:NAME",
    ),
]
Normalize: TypeAlias = Annotated[
    str | None,
    option(_DATA, "Mean and deviation of x/255, for images of bytes.", metavar="MEAN,STD"),
]
ChannelsLast: TypeAlias = Annotated[
    bool, flag(_DATA, "Images are stored with their channels last.", "--channels-last")
]

_ROUNDS = "Rounds"
RetrainMethod: TypeAlias = Annotated[
    str | None,
    option(
        _ROUNDS,
        "Match layer by layer, or average whole models (default: fedma).",
        metavar="fedma|fedavg|fedprox",
    ),
]
Passes: TypeAlias = Annotated[
    int | None,
    option(
        _ROUNDS,
        "How often fedma goes through all layers (default: 1); more is with communication.",
        metavar="N",
    ),
]
Rounds: TypeAlias = Annotated[
    int | None, option(_ROUNDS, "Rounds of fedavg and fedprox (default: 10).", metavar="N")
]
Mu: TypeAlias = Annotated[
    float | None, option(_ROUNDS, "Proximal weight of fedprox (default: 0.001).", metavar="X")
]
Init: TypeAlias = Annotated[
    str | None,
    option(
        _ROUNDS,
        "How models begin without checkpoints (default: independent; shared for fedavg, fedprox).",
        metavar="independent|shared",
    ),
]
InitEpochs: TypeAlias = Annotated[
    int | None,
    option(
        _ROUNDS,
        "Epochs before the first round, without checkpoints (default: --epochs).",
        metavar="N",
    ),
]

_TRAIN = "Local training"
Epochs: TypeAlias = Annotated[
    int | None, option(_TRAIN, "Local epochs per round (default: 20).", metavar="N")
]
BatchSize: TypeAlias = Annotated[
    int | None, option(_TRAIN, "Samples per step (default: 32).", metavar="N")
]
Optimizer: TypeAlias = Annotated[str | None, option(_TRAIN, "Default: sgd.", metavar="sgd|adam")]
LearningRate: TypeAlias = Annotated[
    float | None,
    option(_TRAIN, "Default: 0.01; 0.8 for language models.", metavar="X"),
]
Momentum: TypeAlias = Annotated[float | None, option(_TRAIN, "Of sgd (default: 0.9).")]
WeightDecay: TypeAlias = Annotated[
    float | None, option(_TRAIN, "While nothing is frozen (default: 1e-4).", metavar="X")
]
ClipNorm: TypeAlias = Annotated[
    float | None, option(_TRAIN, "Largest norm of a step's gradient.", metavar="X")
]
MixedPrecision: TypeAlias = Annotated[
    bool, flag(_TRAIN, "Half-precision products where the device has them.", "--mixed-precision")
]
PartialWeightDecay: TypeAlias = Annotated[
    float | None, option(_TRAIN, "While matched layers are frozen (default: 0).", metavar="X")
]
LastRateFactor: TypeAlias = Annotated[
    float | None,
    option(_TRAIN, "Rate of the last layer ÷ rate (default: 0.1; 1 for language models)."),
]
LastEpochsFactor: TypeAlias = Annotated[
    int | None, option(_TRAIN, "Epochs of the last layer ÷ epochs (default: 3).", metavar="N")
]
LastWeightDecay: TypeAlias = Annotated[
    float | None, option(_TRAIN, "Of the last layer (default: 1e-4).", metavar="X")
]

_CLIENTS = "Clients and state"
Engine: TypeAlias = Annotated[
    str | None,
    option(
        _CLIENTS,
        "Train clients one by one here, in processes, or over a Ray cluster (default: local).",
        metavar="local|processes|ray",
    ),
]
Workers: TypeAlias = Annotated[
    int | None,
    option(_CLIENTS, "Processes (default: one per GPU, else as the cores allow).", metavar="N"),
]
Address: TypeAlias = Annotated[
    str | None,
    option(
        _CLIENTS,
        "The Ray cluster (default: one of its own here); auto: the one that Ray finds.",
        metavar="HOST:PORT|auto",
    ),
]
CpusPerClient: TypeAlias = Annotated[
    float | None,
    option(_CLIENTS, "CPUs of one client on Ray (default: --threads-per-client).", metavar="X"),
]
GpusPerClient: TypeAlias = Annotated[
    float | None, option(_CLIENTS, "GPUs of one client on Ray (default: 0).", metavar="X")
]
TrainingDevice: TypeAlias = Annotated[
    str,
    option(
        _CLIENTS,
        "Where clients train and matching runs (default: auto).",
        metavar="auto|cpu|cuda|mps|cuda:0,cuda:1",
    ),
]
ThreadsPerClient: TypeAlias = Annotated[
    int | None, option(_CLIENTS, "CPU threads of one client (default: 1).", metavar="N")
]
ClientTimeout: TypeAlias = Annotated[
    float | None,
    option(_CLIENTS, "Longest training of one client, in seconds.", metavar="SECONDS"),
]
Retries: TypeAlias = Annotated[
    int | None, option(_CLIENTS, "Further tries of a client that fails (default: 1).", metavar="N")
]
MinClients: TypeAlias = Annotated[
    int | None,
    option(_CLIENTS, "Fewer clients than this in a round end the run (default: 1).", metavar="N"),
]
WorkDir: TypeAlias = Annotated[
    Path | None,
    option(
        _CLIENTS, "Where the state is kept (default: the output's name + .work).", metavar="FOLDER"
    ),
]
Resume: TypeAlias = Annotated[bool, flag(_CLIENTS, "Go on where a stopped run was.", "--resume")]
Events: TypeAlias = Annotated[
    Path | None, option(_CLIENTS, "Write one JSON line per event.", metavar="FILE.jsonl")
]
RetrainDryRun: TypeAlias = Annotated[
    bool,
    flag("Output", "Show rounds, widths and bytes; train and write nothing.", "--dry-run"),
]
