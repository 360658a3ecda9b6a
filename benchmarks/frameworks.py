"""What matching costs a Flower server, and what it gives, beside Flower's own FedAvg."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fedmerge
from benchmarks.measure import Result, in_child
from benchmarks.paper_models import LeNet

SITES, BATCH, RATE = 4, 32, 0.05
EPOCHS = (1, 5, 20)  # local, per round
ROUNDS, SEEDS = 6, 3
REPEATS = 3  # of the server's work on one round; the least counts
APP = Path(__file__).parent.parent / "examples" / "flower"

State = Mapping[str, torch.Tensor]


def results() -> Iterator[Result]:
    """Yield the server's cost of a round, and what the example's sites reach."""
    cost = in_child(server_cost, threads=1)
    plain = cost["fedavg"]
    yield Result(f"FedAvg, LeNet × {SITES}, server's CPU time per round", plain, "s")
    for what in ("in place", "apart"):
        seconds = cost[what]
        yield Result(
            f"MatchedAveraging ÷ FedAvg, clients {what}",
            seconds / plain,
            "×",
            note=f"{seconds:.3g} s",
        )
    yield Result("bytes per round, MatchedAveraging ÷ FedAvg", cost["bytes"], "×", bar=1.0)
    yield Result(
        "FedMA, one pass ÷ one FedAvg round: bytes of clients", cost["fedma_bytes"], "×", bar=2.0
    )
    for epochs in EPOCHS:
        found = in_child(accuracies, threads=1, epochs=epochs)
        for name, values in found.items():
            note = f"round 1 {values[0]:.1f} %; best {max(values):.1f} %"
            what = f"{name}, {epochs} local epochs: accuracy after {ROUNDS} rounds, {SEEDS} seeds"
            yield Result(what, values[-1], "%", note=note)


def server_cost() -> Mapping[str, float]:
    """Return the server's CPU seconds per round by strategy, and ratios of bytes."""
    from flwr.serverapp.strategy import FedAvg

    from fedmerge.flower import MatchedAveraging

    start = LeNet().state_dict()
    states = {
        "in place": [_moved(start, seed) for seed in range(SITES)],
        "apart": [_fresh(seed) for seed in range(SITES)],
    }
    quiet: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": SITES}
    plain, matched = FedAvg(**quiet), MatchedAveraging(**quiet)
    found = {"fedavg": _seconds(plain, start, states["apart"])}
    found |= {what: _seconds(matched, start, own) for what, own in states.items()}
    sizes = [
        sum(len(a.data) for a in _aggregated(s, start, states["apart"]).values())
        for s in (plain, matched)
    ]
    return {**found, "bytes": sizes[1] / sizes[0], "fedma_bytes": _fedma_bytes(start)}


def _fedma_bytes(start: State) -> float:
    """Return the bytes of one pass ÷ those of a round in which all models go up and down."""
    images = torch.rand(SITES, 8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    data = {f"site-{k}": (own, torch.arange(8) % 10) for k, own in enumerate(images)}
    retrained = fedmerge.retrain([], data, model=LeNet, epochs=1, device="cpu", max_growth=1)
    moved = sum(entry.bytes_up + entry.bytes_down for entry in retrained.rounds)
    return moved / (2 * SITES * sum(tensor.nbytes for tensor in start.values()))


def _seconds(strategy: Any, start: State, states: list[State]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        _aggregated(strategy, start, states)
        times.append(time.process_time() - began)
    return min(times)


def _aggregated(strategy: Any, start: State, states: list[State]) -> Any:
    """Return what a strategy makes of the replies of one round."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

    from tests.flower import ThreadGrid

    grid: Any = ThreadGrid(None, {node: {} for node in range(1, SITES + 1)})
    asked = strategy.configure_train(1, ArrayRecord(dict(start)), ConfigRecord(), grid)
    replies = []
    for message, state in zip(asked, states, strict=True):
        metrics = MetricRecord({"num-examples": 10})
        content = RecordDict({"arrays": ArrayRecord(dict(state)), "metrics": metrics})
        replies.append(Message(content, reply_to=message))
    arrays, _ = strategy.aggregate_train(1, replies)
    return arrays


def _moved(start: State, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + 0.001 * torch.randn(t.shape, generator=generator) for n, t in start.items()}


def _fresh(seed: int) -> State:
    torch.manual_seed(seed)
    return LeNet().state_dict()


def accuracies(epochs: int) -> Mapping[str, list[float]]:
    """Return the mean accuracy after every round of the example's sites, by strategy."""
    from fedmerge.frameworks import MatchedAverage

    sys.path.insert(0, str(APP))
    runs: dict[str, list[list[float]]] = {"FedAvg": [], "MatchedAveraging": []}
    for seed in range(SEEDS):
        runs["FedAvg"].append(_rounds(_mean, epochs, seed))
        runs["MatchedAveraging"].append(
            _rounds(MatchedAverage(None, None, None).merge, epochs, seed)
        )
    return {
        name: [sum(values) / SEEDS for values in zip(*found, strict=True)]
        for name, found in runs.items()
    }


def _rounds(merge: Any, epochs: int, seed: int) -> list[float]:
    """Return the accuracy of the global model after every round."""
    from digits_app.task import Net, site_data, test_data  # type: ignore[import-not-found]

    sites = {f"site-{k}": site_data(k, SITES) for k in range(SITES)}
    samples = {name: float(len(labels)) for name, (_, labels) in sites.items()}
    torch.manual_seed(seed)
    state, found = Net().state_dict(), []
    images, labels = test_data()
    for number in range(ROUNDS):
        train = partial(_trained, Net, state, epochs)
        states = {
            n: train(d, 100 * seed + 10 * number + k) for k, (n, d) in enumerate(sites.items())
        }
        merged = merge(states, samples)
        state = merged if isinstance(merged, dict) else merged.state_dict()
        model = Net()
        model.load_state_dict(state)
        with torch.no_grad():
            found.append(100 * (model(images).argmax(1) == labels).float().mean().item())
    return found


def _mean(states: Mapping[str, State], samples: Mapping[str, float]) -> State:
    total = sum(samples.values())
    first = next(iter(states.values()))
    return {n: sum(states[s][n] * samples[s] / total for s in states) for n in first}  # type: ignore[misc]


def _trained(build: Any, state: State, epochs: int, data: Any, seed: int) -> State:
    """Return a model that was trained on a site, as the example's ClientApp trains it."""
    torch.manual_seed(seed)
    model: nn.Module = build()
    model.load_state_dict(state)
    images, labels = data
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(labels)), BATCH):
            loss = functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
