"""Matching in two levels, within sites and then between them, against matching all at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import nn

import fedmerge
from fedmerge.training import split_by_dirichlet, split_homogeneously
from fedmerge.values import Array, Float64Array, IntArray

State: TypeAlias = Mapping[str, torch.Tensor]
Split: TypeAlias = Literal["homogeneous", "Dir(0.5)"]
Init: TypeAlias = Literal["independent", "shared"]

SKEW = 0.5
SIDE, CLASSES, HIDDEN = 14, 10, 64  # pixels, digits, units of the net
TRAINING, TEST = 10_000, 10_000  # images of MNIST
EPOCHS, BATCH, RATE, MOMENTUM = 10, 32, 0.05, 0.9  # of a client's training
ROUND_EPOCHS = 3  # of the round; the last layer's three times as many, by the default factor
LEAST = 10  # images of a client
GROWTHS = (1.0, 1.5)  # of the merged model, in one level and in two
BYTE = 255.0
FLOAT32 = 4


@dataclass(frozen=True)
class Scene:
    """Who has which images, and how the clients begin."""

    clients: int
    sites: int
    split: Split
    init: Init
    seed: int


@dataclass(frozen=True)
class Scored:
    """A model made of all clients."""

    scene: Scene
    method: str
    growth: float  # of its parameters
    accuracy: float  # in %, on test images
    cpu: float  # seconds of all servers
    longest: float  # of them one after another: the slowest site and the centre
    up: int  # bytes that reach the centre


@dataclass(frozen=True)
class Clients:
    """Models with what they count, and their images where they train."""

    states: Sequence[State]
    counts: Float64Array  # (clients, classes), samples
    data: Sequence[tuple[Array, IntArray]] = ()

    def part(self, numbers: IntArray) -> Clients:
        """Return some of the clients."""
        data = [self.data[k] for k in numbers] if self.data else ()
        return Clients([self.states[k] for k in numbers], self.counts[numbers], data)


@dataclass(frozen=True)
class Merged:
    """A merged model, and what its servers did."""

    state: State
    cpu: float
    longest: float
    up: int


Merge: TypeAlias = Callable[[Clients], Merged]


SCENES = tuple(
    Scene(clients, sites, split, init, seed)
    for clients, sites in ((32, 4), (100, 10))
    for split in ("homogeneous", "Dir(0.5)")
    for init in ("independent", "shared")
    for seed in (0, 1, 2)
)


def build(hidden: int = HIDDEN) -> nn.Sequential:
    """Return the net: 14×14 images to ten classes."""
    return nn.Sequential(nn.Linear(SIDE**2, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def scored(scene: Scene, source: Path) -> Iterator[Scored]:
    """Yield the accuracy of every way to make one model of a scene's clients."""
    x, y, x_test, y_test = _images(source)
    clients = trained_clients(scene, x[:TRAINING], y[:TRAINING])

    def score(method: str, merged: Merged) -> Scored:
        growth = _parameters(merged.state) / _parameters(clients.states[0])
        accuracy = _accuracy(merged.state, x_test[:TEST], y_test[:TEST])
        return Scored(scene, method, growth, accuracy, merged.cpu, merged.longest, merged.up)

    alone = [_accuracy(state, x_test[:TEST], y_test[:TEST]) for state in clients.states]
    yield Scored(scene, "mean client", 1.0, float(np.mean(alone)), 0.0, 0.0, 0)
    yield score("average", merge(clients, fedmerge.MatchOptions(method="average")))
    between = partial(merge, options=fedmerge.MatchOptions(max_growth=1.0))
    for growth in GROWTHS:
        options = fedmerge.MatchOptions(max_growth=growth)
        for name, within in (("", merge), (" and a round", retrain)):
            once = partial(within, options=options)
            yield score(f"one level{name}, {growth:g}×", once(clients))
            two = in_two_levels(clients, scene.sites, once, between)
            yield score(f"two levels{name}, {growth:g}×", two)


def merge(clients: Clients, options: fedmerge.MatchOptions) -> Merged:
    """Return the clients' merged model, each by its samples, its last layer by those of a class."""
    names = [f"client-{number}" for number in range(1, len(clients.states) + 1)]
    own = dict(zip(names, clients.counts, strict=True))
    weighted = replace(
        options,
        client_weight={name: float(row.sum()) for name, row in own.items()},
        class_counts={name: row.tolist() for name, row in own.items()},
    )
    began = time.process_time()
    found = fedmerge.match(clients.states, weighted)
    state = found.state_dict()
    cpu = time.process_time() - began
    up = FLOAT32 * sum(map(_parameters, clients.states))
    return Merged(state, cpu, cpu, up)


def retrain(clients: Clients, options: fedmerge.MatchOptions) -> Merged:
    """Return the clients' model after its last layer was trained by all behind the matched one."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (x, y) in enumerate(clients.data, start=1):
            np.savez(Path(folder) / f"client-{number}.npz", x=x, y=y)
        began = time.process_time()
        found = fedmerge.retrain(
            clients.states,
            [folder],
            fedmerge.RetrainOptions(
                training=fedmerge.TrainSettings(epochs=ROUND_EPOCHS), matching=options
            ),
            model=fedmerge.ModelCode(f"{__name__}:build"),
            running=fedmerge.Running(device="cpu"),
        )
        cpu = time.process_time() - began
    return Merged(found.state_dict(), cpu, cpu, sum(entry.bytes_up for entry in found.rounds))


def in_two_levels(clients: Clients, sites: int, within: Merge, between: Merge) -> Merged:
    """Return the merge of the sites' merges, which count what their clients count together.

    Neighbours share a site.
    """
    parts = np.array_split(np.arange(len(clients.states)), sites)
    merged = [within(clients.part(part)) for part in parts]
    sums = np.stack([clients.counts[part].sum(axis=0) for part in parts])
    last = between(Clients([site.state for site in merged], sums))
    each = [site.cpu for site in merged]
    return Merged(last.state, sum(each) + last.cpu, max(each) + last.cpu, last.up)


def trained_clients(scene: Scene, x: Array, y: IntArray) -> Clients:
    """Return a scene's clients, trained on their own images alone."""
    rng = np.random.default_rng(scene.seed)
    if scene.split == "homogeneous":
        parts = split_homogeneously(y, scene.clients, rng=rng)
    else:
        parts = split_by_dirichlet(y, scene.clients, SKEW, rng=rng, least=LEAST)
    states = []
    for number, rows in enumerate(parts.values()):
        own = number if scene.init == "independent" else 0
        torch.manual_seed(scene.clients * scene.seed + own)
        states.append(_trained(build(), torch.from_numpy(x[rows]), torch.from_numpy(y[rows])))
    counts = [np.bincount(y[rows], minlength=CLASSES) for rows in parts.values()]
    data = [(x[rows], y[rows]) for rows in parts.values()]
    return Clients(states, np.array(counts, dtype=np.float64), data)


def _trained(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for _ in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(x)), BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.state_dict()


def _images(source: Path) -> tuple[Array, IntArray, Array, IntArray]:
    """Return MNIST with 2×2 pixels averaged, (n, 196), training images in a fixed random order."""
    with np.load(source) as data:
        order = np.random.default_rng(0).permutation(len(data["x_train"]))
        return (
            _halved(data["x_train"][order]),
            data["y_train"][order].astype(np.int64),
            _halved(data["x_test"]),
            data["y_test"].astype(np.int64),
        )


def _halved(images: Array) -> Array:
    blocks = images.reshape(len(images), SIDE, 2, SIDE, 2).astype(np.float32) / BYTE
    mean: Array = blocks.mean(axis=(2, 4)).reshape(len(images), SIDE**2)
    return mean


def _accuracy(state: State, x: Array, y: IntArray) -> float:
    model = build(len(state["0.bias"]))
    model.load_state_dict(dict(state))
    with torch.no_grad():
        decided = model(torch.from_numpy(x)).argmax(1).numpy()
    return 100 * float(np.mean(decided == y))


def _parameters(state: State) -> int:
    return sum(tensor.numel() for tensor in state.values())
