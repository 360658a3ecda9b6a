"""What a round costs in other processes and over Ray, beside the same round in this process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import fedmerge
from benchmarks.measure import Result, in_child
from benchmarks.retraining import MODEL, write_shards
from fedmerge.engines import usable_cores
from fedmerge.federated import (
    ClientFinished,
    RoundDone,
    RoundStarted,
    RunFinished,
    RunStarted,
)

CLIENTS, SAMPLES, ROUNDS, LOCAL = 4, 256, 8, "local"
TURNS = 3  # of all engines; the least of each part counts
PARTS = ("first", "round", "outside", "end")  # seconds
# One slot each, so that what differs from the local engine is what the way there and back costs.
ENGINES: Mapping[str, Mapping[str, Any]] = {
    LOCAL: {},
    "processes": {"workers": 1},
    "ray": {"cpus_per_client": usable_cores()},
}


def results() -> Iterator[Result]:
    """Yield what an engine takes in a round besides training, and before and after the rounds.

    Training itself is left out, since a machine under load is not equally fast for all processes.
    """
    sizes = {"clients": CLIENTS, "samples": SAMPLES, "rounds": ROUNDS}
    turns = [
        {name: in_child(measure, threads=1, engine=name, **sizes) for name in ENGINES}
        for _ in range(TURNS)
    ]
    took = {n: {part: min(turn[n][part] for turn in turns) for part in PARTS} for n in ENGINES}
    here = took[LOCAL]["outside"]
    what = f"fedavg, LeNet, {CLIENTS} clients × {SAMPLES} images: a round without training"
    note = f"with it {took[LOCAL]['round']:.3g} s"
    yield Result(f"{what}, local", here, "s", note=note)
    for name in [name for name in ENGINES if name != LOCAL]:
        one = took[name]
        note = f"{one['outside']:.3g} s, with training {one['round']:.3g} s; the first round "
        note += f"{one['first']:.3g} s, the end {one['end']:.2g} s"
        yield Result(f"of {name}, one slot: beyond local", one["outside"] - here, "s", note=note)


def measure(engine: str, clients: int, samples: int, rounds: int) -> dict[str, Any]:
    """Return wall seconds: the first round and the engine's start, the least round, the end."""
    times: list[float] = []
    training: list[float] = []  # by round, of all clients, in the clients' own processes

    def hear(event: object) -> None:
        if isinstance(event, RunStarted | RoundDone | RunFinished):
            times.append(time.perf_counter())
        if isinstance(event, RoundStarted):
            training.append(0.0)
        if isinstance(event, ClientFinished):
            training[-1] += event.seconds

    with tempfile.TemporaryDirectory() as folder:
        fedmerge.retrain(
            [],
            [write_shards(Path(folder) / "shards", clients=clients, samples=samples)],
            fedmerge.RetrainOptions(
                method="fedavg", rounds=rounds, training=fedmerge.TrainSettings(epochs=1)
            ),
            model=fedmerge.ModelCode(MODEL, {"start": "torch"}),
            running=fedmerge.Running(engine=engine, device="cpu", **ENGINES[engine]),  # type: ignore[arg-type]
            hear=hear,
        )
    first, *usual, end = [after - before for before, after in pairwise(times)]
    outside = [whole - own for whole, own in zip(usual, training[1:], strict=True)]
    return {"first": first, "round": min(usual), "outside": min(outside), "end": end}
