"""What a round costs in other processes and over Ray, beside the same round in this process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import fedmerge
from benchmarks.measure import Result, in_child
from benchmarks.retraining import MODEL, write_shards
from fedmerge.engines.calls import usable_cores
from fedmerge.workflow.retrain.events import RoundDone, RunFinished, RunStarted

CLIENTS, SAMPLES, ROUNDS, LOCAL = 4, 256, 6, "local"
# One slot each, so that what differs from the local engine is what the way there and back costs.
ENGINES: Mapping[str, Mapping[str, Any]] = {
    LOCAL: {},
    "processes": {"workers": 1},
    "ray": {"cpus_per_client": usable_cores()},
}


def results() -> Iterator[Result]:
    """Yield each engine's seconds per round, once all are warm, and before and after the rounds."""
    sizes = {"clients": CLIENTS, "samples": SAMPLES, "rounds": ROUNDS}
    took = {name: in_child(measure, threads=1, engine=name, **sizes) for name in ENGINES}
    here = took[LOCAL]["round"]
    yield Result(f"fedavg, LeNet, {CLIENTS} clients × {SAMPLES} images: a round, local", here, "s")
    for name in [name for name in ENGINES if name != LOCAL]:
        one = took[name]
        note = f"{one['round']:.3g} s a round, {one['round'] / here:.2f} × local; the first "
        note += f"{one['first']:.3g} s, the end {one['end']:.2g} s"
        yield Result(f"of {name}, one slot: beyond local", one["round"] - here, "s", note=note)


def measure(engine: str, clients: int, samples: int, rounds: int) -> dict[str, Any]:
    """Return wall seconds: of a usual round, of the first and the engine's start, of the end."""
    times: list[float] = []

    def hear(event: object) -> None:
        if isinstance(event, RunStarted | RoundDone | RunFinished):
            times.append(time.perf_counter())

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
    steps = [after - before for before, after in pairwise(times)]
    return {"first": steps[0], "round": median(steps[1:-1]), "end": steps[-1]}
