"""The `demo` command: merge digit classifiers that are trained on the spot."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedmerge.cli.output import Terminal
from fedmerge.errors import FedmergeError
from fedmerge.merging.loading import load_model
from fedmerge.process import python_command
from fedmerge.values import wording
from fedmerge.values.arrays import IntArray
from fedmerge.values.wording import AVERAGE, Progress, percent, silent


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Train, merge and compare, and say how to go on."""
    folder: Path = given["folder"]
    terminal.note("training 4 clients on skewed parts of scikit-learn's digits …")
    with terminal.progress() as progress:
        demo = run_demo(folder, progress=progress)
    rows_found = [vars(row) for row in demo.rows]
    found = {"commands": list(demo.commands), "rows": rows_found, "report": str(demo.report)}
    terminal.result(found)
    for command in demo.commands:
        terminal.line(f"$ {command}")
    rows = [
        [row.model, percent(row.accuracy), wording.count(row.parameters), f"{row.growth:.2f}"]
        for row in demo.rows
    ]
    terminal.table("digits", ["model", "accuracy", "parameters", "growth"], rows)
    terminal.line(f"the files are in {folder}; look into one with:")
    terminal.line(f"fedmerge inspect {folder / 'matched.pt'}")
    terminal.line(f"a page about the merge, for a browser: {demo.report}")


CLIENTS = 4
SKEW = 1.0  # Dirichlet concentration of each class over the clients
EPOCHS = 20
BATCH = 32
TEST_SHARE = 0.25
SEED = 0
MERGES = {  # what the table calls them → their files
    AVERAGE: "average.pt",
    "average, counts": "average-counts.pt",
    "matched, files alone": "files-alone.pt",
    "matched, code and counts": "matched.pt",
}
PAGE = "report.html"


class DigitsNet(nn.Module):
    """A perceptron with one hidden layer for 8×8 images of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (images, 10) of images (images, 8, 8)."""
        logits: torch.Tensor = self.fc2(self.fc1(images.flatten(1)).relu())
        return logits


@dataclass(frozen=True)
class Images:
    """Images (n, 8, 8) in [0, 1] with their labels (n,)."""

    x: torch.Tensor
    y: torch.Tensor

    def take(self, indices: IntArray) -> Images:
        """Return some of the images."""
        chosen = torch.from_numpy(indices)
        return Images(self.x[chosen], self.y[chosen])


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    model: str
    accuracy: float
    parameters: int
    growth: float  # parameters ÷ those of one client


@dataclass(frozen=True)
class Demo:
    """What the demo did: its commands and the comparison."""

    commands: tuple[str, ...]
    rows: tuple[Row, ...]
    report: Path  # a page about the matched file


def run_demo(folder: Path, *, progress: Progress = silent) -> Demo:
    """Train the clients, merge their files through the command line and compare everything."""
    torch.set_num_threads(1)  # the net is too small to gain from more
    train, test = _digits()
    folder.mkdir(parents=True, exist_ok=True)
    parts = _skewed_parts(train.y.numpy())
    models = _trained_clients(train, parts, progress)
    for name, model in models.items():
        torch.save(model.state_dict(), folder / f"{name}.pt")
    counts = json.dumps(_class_counts(train, parts))
    (folder / "counts.json").write_text(counts, encoding="utf-8")
    np.savez(folder / "test.npz", x=test.x.numpy(), y=test.y.numpy())
    commands = []
    steps = _steps(folder, [folder / f"{name}.pt" for name in models])
    for number, step in enumerate(steps):
        progress("merging", number, len(steps))
        commands.append(_fedmerge(*step, "--force"))
    progress("merging", len(steps), len(steps))
    return Demo(tuple(commands), tuple(_rows(folder, models, test)), folder / PAGE)


def _trained_clients(
    train: Images, parts: Sequence[IntArray], progress: Progress
) -> dict[str, DigitsNet]:
    """Return a model per part, each from an initialisation of its own."""
    models = {}
    for number, part in enumerate(parts, start=1):
        progress("training", number - 1, len(parts))
        torch.manual_seed(SEED + number)
        models[f"client-{number}"] = _train(DigitsNet(), train.take(part))
    progress("training", len(parts), len(parts))
    return models


def _steps(folder: Path, clients: Sequence[Path]) -> list[tuple[str | Path, ...]]:
    """Return the commands: from the files alone, then with all that a user may know of them."""
    average, counted, alone, matched = (folder / file for file in MERGES.values())
    model = ("--model", f"{__name__}:{DigitsNet.__name__}")
    counts = ("--class-counts", folder / "counts.json")
    return [
        ("match", *clients, "--method", "average", "-o", average),
        ("match", *clients, "--method", "average", *counts, "-o", counted),
        ("match", *clients, "-o", alone),
        ("match", *clients, *model, *counts, "-o", matched),
        ("report", matched, *model, "--data", folder / "test.npz", "-o", folder / PAGE),
    ]


def _rows(folder: Path, models: Mapping[str, DigitsNet], test: Images) -> Iterator[Row]:
    """Yield how good clients, their ensemble and the merges are."""
    every = list(models.values())
    size = _parameters(every[0])
    for name, model in models.items():
        yield Row(name, _accuracy([model], test), size, 1.0)
    yield Row("ensemble", _accuracy(every, test), len(every) * size, float(len(every)))
    for name, file in MERGES.items():
        merged = load_model(DigitsNet, folder / file)
        merged_size = _parameters(merged)
        yield Row(name, _accuracy([merged], test), merged_size, merged_size / size)


def _digits() -> tuple[Images, Images]:
    """Return training and test images."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FedmergeError(
            "the demo needs scikit-learn's digits", "pip install 'fedmerge[demo]'"
        ) from None
    digits = load_digits()
    x = torch.from_numpy(digits.images).float() / 16
    images = Images(x, torch.from_numpy(digits.target).long())
    order = np.random.default_rng(SEED).permutation(len(x))
    cut = int(TEST_SHARE * len(x))
    return images.take(order[cut:]), images.take(order[:cut])


def _skewed_parts(labels: IntArray) -> list[IntArray]:
    """Split the images so that each client sees some digits often and others hardly."""
    rng = np.random.default_rng(SEED)
    parts: list[list[int]] = [[] for _ in range(CLIENTS)]
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        shares = rng.dirichlet([SKEW] * CLIENTS)
        cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
        for part, chosen in zip(parts, np.split(members, cuts), strict=True):
            part.extend(chosen.tolist())
    return [np.array(sorted(part)) for part in parts]


def _class_counts(data: Images, parts: Sequence[IntArray]) -> dict[str, list[int]]:
    """Return how many images of every digit each client has: all that it tells of its data."""
    labels = data.y.numpy()
    return {
        f"client-{number}": np.bincount(labels[part], minlength=10).tolist()
        for number, part in enumerate(parts, start=1)
    }


def _train(model: DigitsNet, data: Images) -> DigitsNet:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        order = torch.randperm(len(data.x))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.x[batch]), data.y[batch])
            torch.autograd.backward(loss)
            optimizer.step()
    return model.eval()


def _fedmerge(*arguments: str | Path) -> str:
    """Run a command of fedmerge as a user would, and return it as typed."""
    words = [str(argument) for argument in arguments]
    command = python_command("from fedmerge.cli import main; main()", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FedmergeError(f"`fedmerge {' '.join(words)}` failed: {done.stderr.strip()}")
    return f"fedmerge {' '.join(words)}"


def _accuracy(models: Sequence[nn.Module], data: Images) -> float:
    """Return the accuracy of the models' mean outputs."""
    with torch.no_grad():
        outputs = torch.stack([model(data.x) for model in models]).mean(0)
    return float((outputs.argmax(1) == data.y).float().mean())


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
