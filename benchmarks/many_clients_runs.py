"""What `match` and one pass of rounds cost with so many small clients, each in a fresh process."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedmerge
from benchmarks.measure import run_python
from benchmarks.retraining import Watch
from fedmerge.federated import STATE_FILE, EngineName, RoundDone
from fedmerge.values import Array, IntArray

MODEL = "benchmarks.many_clients_runs:build"
COUNTS = (10, 32, 100, 316, 1000)
INPUTS, HIDDEN, CLASSES = 64, 32, 10  # of the net
FLOAT32 = 4  # bytes
PARAMETERS = (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * CLASSES
SAMPLES = 64  # of every client
SKEW = 0.5  # Dirichlet concentration of each client's classes
STEPS, RATE = 30, 1e-2  # of a client's training before: Adam on all of its samples
EPOCHS = 1  # of a round; the last layer's three times as many, by the default factor


@dataclass(frozen=True)
class Measured:
    """One command with so many clients."""

    command: str  # match, or retrain by an engine
    clients: int
    cpu: float  # seconds of the work, imports and start-up left out
    training: float  # of them in the clients' own steps
    peak: int  # bytes of the process
    base: int  # of the same with two clients: what the libraries take
    up: int  # bytes of numbers, of all clients
    down: int
    width: int  # of the global hidden layer
    record: int  # bytes of the merge record
    state: int  # bytes of the work dir at its largest, 0 where there is none
    header: int  # bytes of the state's safetensors header at its largest, which is limited
    seconds: float = 0.0  # by the clock, of the round in which clients train


def build(hidden: int = HIDDEN) -> nn.Module:
    """Return the net: 8×8 digits to ten classes."""
    return nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def measured(clients: int, engine: EngineName) -> Iterator[Measured]:
    """Yield what a pass of `retrain` of so many clients takes; by the local engine, `match` too."""
    commands: dict[str, dict[str, Any]] = {"retrained": {"engine": engine}}
    if engine == "local":
        commands = {"matched": {}, **commands}
    with tempfile.TemporaryDirectory() as pair, tempfile.TemporaryDirectory() as folder:
        _in_process("write_clients", folder=pair, clients=2)
        _in_process("write_clients", folder=folder, clients=clients)
        for name, arguments in commands.items():
            least = _in_process(name, folder=pair, **arguments)
            found = _in_process(name, folder=folder, **arguments)
            yield Measured(clients=clients, peak=found.peak, base=least.peak, **found.values)


@dataclass(frozen=True)
class _Found:
    values: Mapping[str, Any]
    peak: int


def _in_process(function: str, **arguments: Any) -> _Found:
    """Call a function of this module in a process of its own, and return its peak memory too."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = json.dumps({"function": function, "result": str(result), "arguments": arguments})
        run = run_python(["-m", "benchmarks.child", f"{__name__}:keep_result", given], threads=1)
        return _Found(json.loads(result.read_text(encoding="utf-8")), run.peak)


def keep_result(function: str, result: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call one of the functions below, and keep what it returns in a file."""
    calls = (write_clients, matched, retrained)
    call = {own.__name__: own for own in calls}[function]
    Path(result).write_text(json.dumps(call(**arguments)), encoding="utf-8")
    return {}


def write_clients(folder: str, clients: int) -> dict[str, Any]:
    """Write clients trained on digits, skewed by class, to `models` and `shards`."""
    from sklearn.datasets import load_digits

    digits, labels = load_digits(return_X_y=True)
    x, y = (digits / digits.max()).astype(np.float32), labels.astype(np.int64)
    models, shards = Path(folder) / "models", Path(folder) / "shards"
    models.mkdir()
    shards.mkdir()
    rng = np.random.default_rng(0)
    for number in range(clients):
        shares = rng.dirichlet(np.full(CLASSES, SKEW))[y]
        rows = rng.choice(len(y), SAMPLES, p=shares / shares.sum())
        torch.manual_seed(number)
        torch.save(_trained(x[rows], y[rows]).state_dict(), models / f"c{number:04d}.pt")
        np.savez(shards / f"c{number:04d}.npz", x=x[rows], y=y[rows])
    return {}


def _trained(x: Array, y: IntArray) -> nn.Module:
    model, samples, labels = build(), torch.from_numpy(x), torch.from_numpy(y)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(samples), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def matched(folder: str) -> dict[str, Any]:
    """Merge the clients of a folder; every client's numbers go up, the global ones to all."""
    place, output = Path(folder), Path(folder) / "matched.pt"
    began = time.process_time()
    merge = fedmerge.match([place / "models"], output=output)
    cpu = time.process_time() - began
    return {
        "command": "match",
        "cpu": cpu,
        "training": 0.0,
        "up": FLOAT32 * merge.session.ensemble_parameters,
        "down": FLOAT32 * merge.parameters * len(merge.clients),
        "width": merge.groups[0].width,
        "record": output.with_name(f"{output.name}.json").stat().st_size,
        "state": 0,
        "header": 0,
    }


def retrained(folder: str, engine: EngineName) -> dict[str, Any]:
    """Match the first layer of a folder's clients, let them train the last one, average it.

    The clients' CPU time is known where they train in this process.
    """
    place, output, watch = Path(folder), Path(folder) / "retrained.pt", Watch()
    sizes, headers = [0], [0]

    def hear(event: object) -> None:
        watch.hear(event)
        if isinstance(event, RoundDone):
            sizes.append(sum(path.stat().st_size for path in (place / "work").iterdir()))
            with (place / "work" / STATE_FILE).open("rb") as state:
                headers.append(int.from_bytes(state.read(8), "little"))

    began = time.process_time()
    with watch.watching():
        done = fedmerge.retrain(
            [place / "models"],
            [place / "shards"],
            fedmerge.RetrainOptions(training=fedmerge.TrainSettings(epochs=EPOCHS)),
            model=fedmerge.ModelCode(MODEL),
            work_dir=place / "work",
            output=output,
            running=fedmerge.Running(engine=engine, device="cpu"),
            hear=hear,
        )
    cpu = time.process_time() - began
    return {
        "command": f"retrain, {engine}",
        "cpu": cpu,
        "training": sum(part.training.cpu for part in watch.parts),
        "up": sum(entry.bytes_up for entry in done.rounds),
        "down": sum(entry.bytes_down for entry in done.rounds),
        "width": done.groups[0].width,
        "record": output.with_name(f"{output.name}.json").stat().st_size,
        "state": max(sizes),
        "header": max(headers),
        "seconds": done.rounds[-1].seconds,
    }
