"""What `benchmarks.paper` may run: every experiment as a value, and the settings of each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENSEMBLE = "ensemble"  # clients that train alone, and what they give together
METHODS = ("fedma", "fedavg", "fedprox", ENSEMBLE)


@dataclass(frozen=True)
class Experiment:
    """One run, with every number that its result depends on."""

    part: str  # of the page
    dataset: str
    sha256: str  # of the data file
    method: str  # fedma, fedavg, fedprox or ensemble
    init: str  # independent, shared or matched
    start: str  # of the weights: he or torch
    seed: int
    clients: int
    samples: int
    on: str  # what it is evaluated on: test or validation
    epochs: int  # local, per round
    rounds: int
    learning_rate: float
    batch_size: int
    last_rate_factor: float
    last_epochs_factor: int
    clip_norm: float | None = None
    hidden: int = 0  # of the LSTM
    max_growth: float = 1.25
    match_threshold: float = 0.5
    refine: int = 3  # matchings that compare recurrent weights too, at most
    keep: tuple[str, ...] = ()  # tensors that are the first client's for all, and never trained
    attempts: tuple[str, ...] = ()  # at matching LSTMs better: rotation, signs


@dataclass(frozen=True)
class Suite:
    """A data set's experiments: their common settings, and how many rounds a pass has."""

    model: str
    task: str
    layers: int
    defaults: Mapping[str, Any]
    quick: Mapping[str, Any]  # changes for a trial of seconds
    parts: Mapping[str, Sequence[Mapping[str, Any]]]  # part → what each run changes


INDEPENDENT = ({"method": "fedma"}, {"method": "fedavg"})
SHARED = ({"method": "fedavg", "init": "shared"}, {"method": "fedprox", "init": "shared"})
ALONE = {"method": ENSEMBLE}
STARTS = tuple({"method": "fedavg", "init": init} for init in ("matched", "shared", "independent"))

SUITES: Mapping[str, Suite] = {
    "mnist": Suite(
        model="lenet",
        task="classification",
        layers=4,
        defaults={
            "start": "he",
            "clients": 4,
            "samples": 5000,
            "epochs": 3,
            "rounds": 8,
            "learning_rate": 0.01,
            "batch_size": 32,
            "last_rate_factor": 1.0,
            "last_epochs_factor": 1,
        },
        quick={"samples": 1000, "rounds": 4, "epochs": 1},
        parts={
            "main": (*INDEPENDENT, *SHARED, ALONE),
            "initialisation": tuple({**run, "start": "torch"} for run in INDEPENDENT),
            "epochs": tuple(
                {**run, "epochs": epochs, "rounds": 4} for epochs in (1, 10) for run in INDEPENDENT
            ),
            "starts": tuple({**run, "rounds": 4} for run in STARTS),
            "starts-torch": tuple({**run, "rounds": 4, "start": "torch"} for run in STARTS),
        },
    ),
    "shakespeare": Suite(
        model="char_lstm",
        task="language-model",
        layers=3,
        defaults={
            "start": "torch",
            "clients": 4,
            "samples": 25_000,
            "epochs": 5,
            "rounds": 6,
            "learning_rate": 0.8,
            "batch_size": 10,
            "last_rate_factor": 1.0,
            "last_epochs_factor": 1,
            "clip_norm": 5.0,
            "hidden": 256,
        },
        quick={"samples": 4000, "rounds": 3, "epochs": 1, "hidden": 32},
        parts={
            "main": (*INDEPENDENT, {"method": "fedavg", "init": "shared"}, ALONE),
            "starts": STARTS,
        },
    ),
    "cifar10": Suite(
        model="vgg9_half",
        task="classification",
        layers=9,
        defaults={
            "start": "he",
            "clients": 2,
            "samples": 4000,
            "epochs": 3,
            "rounds": 9,
            "learning_rate": 0.01,
            "batch_size": 32,
            "last_rate_factor": 0.1,
            "last_epochs_factor": 3,
        },
        quick={"samples": 1000, "epochs": 1},
        parts={
            "main": (*INDEPENDENT, {"method": "fedavg", "init": "shared"}, ALONE),
            "starts": STARTS,
        },
    ),
}


def experiments(
    dataset: str,
    sha256: str,
    seeds: Sequence[int],
    *,
    parts: Sequence[str] = (),
    methods: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    quick: bool = False,
) -> Iterator[Experiment]:
    """Yield the runs of a data set, its local epochs for the first seed alone.

    No parts or methods are all of them.
    """
    suite = SUITES[dataset]
    common = {"init": "independent", "on": "test", **suite.defaults}
    for part, runs in suite.parts.items():
        if parts and part not in parts:
            continue
        chosen = [run for run in runs if not methods or run["method"] in methods]
        for seed in seeds[:1] if part == "epochs" else seeds:
            for run in chosen:
                values = {**common, **run, **(suite.quick if quick else {}), **(changes or {})}
                yield Experiment(part=part, dataset=dataset, sha256=sha256, seed=seed, **values)


def digest(source: Path) -> str:
    """Return the SHA-256 of a data file."""
    return hashlib.sha256(source.read_bytes()).hexdigest()
