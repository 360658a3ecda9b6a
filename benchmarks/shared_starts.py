"""Clients of digits that share their initial weights: is a merge ever worse than their average?

`python -m benchmarks.shared_starts` trains and merges small nets for some minutes, and prints the
table that docs/explanation.md quotes. Its seeds are none that the rules were developed with.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

import fedmerge
from benchmarks.digits import FIRST_SEED, Data, data, dirichlet, print_table, taught
from tests import digits

CLIENTS = 3
ALPHAS = (0.3, 100.0)  # of Dirichlet: clients that miss classes, and equal ones
STEPS = (20, 60, 300)  # of training
SEEDS = range(FIRST_SEED, FIRST_SEED + 3)
SHAPE = (2, 1, 8, 8)
NOTHING_RUN = fedmerge.ProbeOptions("none")


class RowLSTM(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.lstm(x[:, 0])[0][:, -1])
        return logits


class Residual(nn.Module):
    """Two residual blocks with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(_block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = (x + block(x)).relu()
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _block() -> nn.Module:
    first, second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
    return nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), second, nn.BatchNorm2d(16))


def cnn() -> nn.Module:
    """Return two convolutions and two fully connected layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def normed_cnn() -> nn.Module:
    """Return two convolutions with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


NETS: Mapping[str, str] = {  # name → where its code is
    "perceptron": digits.MODEL,
    "CNN": f"{__spec__.name}:cnn",
    "CNN with batch norm": f"{__spec__.name}:normed_cnn",
    "LSTM": f"{__spec__.name}:RowLSTM",
    "residual net": f"{__spec__.name}:Residual",
}


@dataclass(frozen=True)
class Scores:
    """Accuracies in % on test images."""

    average: float
    weights: float  # matched as files alone are
    code: float


def scores(net: str, alpha: float, steps: int, seed: int) -> Scores:
    """Train clients from the same weights, and merge them in three ways."""
    train, test = data()
    code = fedmerge.ModelCode(NETS[net], input_shapes=(SHAPE,))
    torch.manual_seed(seed)
    start = code.build().state_dict()
    parts = dirichlet(train.y.numpy(), alpha, CLIENTS, seed)
    clients = [_client(code, start, train.some(own), steps) for own in parts]
    average = fedmerge.match(clients, fedmerge.MatchOptions(method="average"), model=code)
    return Scores(
        average=_accuracy(average, code, test),
        weights=_accuracy(fedmerge.match(clients, model=code, probes=NOTHING_RUN), code, test),
        code=_accuracy(fedmerge.match(clients, model=code), code, test),
    )


def _client(
    code: fedmerge.ModelCode, start: Mapping[str, Tensor], own: Data, steps: int
) -> dict[str, Tensor]:
    model = code.build()
    model.load_state_dict(start)
    return dict(taught(model, own, steps).state_dict())


def _accuracy(merge: fedmerge.Merge, code: fedmerge.ModelCode, test: Data) -> float:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = merge.write(Path(folder) / "merged.safetensors")
        decisions = fedmerge.load_model(code.build, path).eval()(test.x).argmax(1)
    return 100 * float((decisions == test.y).float().mean())


def rows() -> Iterator[Sequence[str]]:
    """Yield the table."""
    what = ("gained in the mean", "at worst", "worse, better")
    yield ["clients", "merges", *(f"{source}: {w}" for source in ("weights", "code") for w in what)]
    for net in NETS:
        each = [scores(net, *case) for case in product(ALPHAS, STEPS, SEEDS)]
        weights = [own.weights - own.average for own in each]
        code = [own.code - own.average for own in each]
        yield [net, str(len(each)), *_told(weights), *_told(code)]


def _told(gains: Sequence[float]) -> list[str]:
    worse, better = (sum(sign * gain > 0 for gain in gains) for sign in (-1, 1))
    return [f"{statistics.mean(gains):+.1f}", f"{min(gains):+.1f}", f"{worse}, {better}"]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print_table(rows())


if __name__ == "__main__":
    main()
