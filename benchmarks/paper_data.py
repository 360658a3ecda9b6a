"""Shards of the paper's data sets, at the size of an experiment, for `benchmarks.paper`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmerge.training import Preparation, Shard, split_by_dirichlet, write_shards
from fedmerge.values import Array, IntArray

LEAST = 100  # samples of a client; proportions are drawn again until each has so many
STEPS = 80  # characters of a sequence
HELD_OUT = 0.2  # of each role's text, its end: the paper's share for the global test set
ON = ("test", "validation")

PREPARATIONS: Mapping[str, Preparation] = {
    "mnist": Preparation((0.1307,), (0.3081,)),
    "cifar10": Preparation(  # the paper's, rounded
        (0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616), channels_last=True
    ),
}


@dataclass(frozen=True)
class Scene:
    """Written shards, the data that models are evaluated on, and what the model must know."""

    shards: Path  # a folder
    evaluation: Path
    tokens: int = 0  # different characters, of texts

    @property
    def clients(self) -> dict[str, Path]:
        """The clients' names with their files, in their order."""
        return {path.stem: path for path in sorted(self.shards.iterdir())}


@dataclass(frozen=True)
class Split:
    """How a data set is dealt out."""

    dataset: str
    clients: int
    samples: int  # of all clients together; characters of each role, of texts
    seed: int
    on: str  # test, or validation: training samples that no client has
    dirichlet: float = 0.5


def write_scene(source: Path, folder: Path, split: Split) -> Scene:
    """Deal out a data set to the clients of an experiment."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = _write_text if split.dataset == "shakespeare" else _write_images
    return writer(source, folder, split)


def _write_images(source: Path, folder: Path, split: Split) -> Scene:
    """Draw images at random, and give each client its share of each class by Dir(0.5)."""
    preparation = PREPARATIONS[split.dataset]
    rng = np.random.default_rng(split.seed)
    with np.load(source) as data:
        order = rng.permutation(len(data["y_train"]))
        chosen, others = np.sort(order[: split.samples]), np.sort(order[split.samples :])
        images = Shard("all", data["x_train"], data["y_train"], preparation)
        rows = others[: split.samples] if split.on == "validation" else None
        evaluation = (
            (data["x_test"], data["y_test"]) if rows is None else (images.x[rows], images.y[rows])
        )
    parts = split_by_dirichlet(
        images.targets[chosen], split.clients, split.dirichlet, rng=rng, least=LEAST
    )
    shards = folder / "shards"
    shards.mkdir()
    rows_of = {name: chosen[rows] for name, rows in parts.items()}
    with ExitStack() as files:
        write_shards(
            shards, images, rows_of, create=lambda path: files.enter_context(path.open("wb"))
        )
    return Scene(shards, _saved(folder, preparation(evaluation[0]), evaluation[1]))


def _write_text(source: Path, folder: Path, split: Split) -> Scene:
    """Make a client of each of the roles that say most; the ends of their texts are held out.

    Validation takes as much from the end of the training text.
    """
    text = source.read_text(encoding="utf-8")
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    spoken = _speeches(text)
    roles = sorted(spoken, key=lambda role: len(spoken[role]), reverse=True)[: split.clients]
    shards = folder / "shards"
    shards.mkdir()
    held = []
    for role in roles:
        numbers = np.array([alphabet[c] for c in spoken[role][: split.samples]], np.int64)
        train, test = _cut(numbers)
        if split.on == "validation":
            train, test = _cut(train)
        held.append(_sequences(test))
        x, y = _sequences(train)
        np.savez(shards / f"{role.title().replace(' ', '-')}.npz", x=x, y=y)
    x, y = (np.concatenate(parts) for parts in zip(*held, strict=True))
    return Scene(shards, _saved(folder, x, y), len(alphabet))


def _speeches(text: str) -> dict[str, str]:
    """Return all that each role says, in order."""
    said: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        role, colon, speech = block.strip().partition(":\n")
        if colon and "\n" not in role:
            said.setdefault(role, []).append(speech)
    return {role: "\n".join(speeches) for role, speeches in said.items()}


def _cut(numbers: IntArray) -> tuple[IntArray, IntArray]:
    """Return the beginning, and the end that is held out."""
    border = int(len(numbers) * (1 - HELD_OUT))
    return numbers[:border], numbers[border:]


def _sequences(numbers: IntArray) -> tuple[IntArray, IntArray]:
    """Return characters (n, steps) and those that follow them (n, steps)."""
    count = (len(numbers) - 1) // STEPS
    inputs = numbers[: count * STEPS].reshape(count, STEPS)
    return inputs, numbers[1 : count * STEPS + 1].reshape(count, STEPS)


def _saved(folder: Path, x: Array, y: Array) -> Path:
    path = folder / "evaluation.npz"
    np.savez(path, x=x, y=y)
    return path
