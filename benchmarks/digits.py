"""Rules of one-shot merges on small clients of scikit-learn's digits, as Markdown tables.

`python -m benchmarks.digits` trains some hundred perceptrons, which takes two minutes, and prints
the tables that docs/explanation.md quotes: what clients count in their ensemble, and which odd
clients are found among others. Its seeds are none that any rule was developed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.merging import (
    Averaging,
    decisions_of,
    ensemble_weights,
    mean_outputs,
    outliers,
    pooled_weights,
)
from fedmerge.probes import noise_probes
from fedmerge.values import IntArray
from tests import digits

CLASSES = 10
STEPS, BATCH, RATE = 300, 64, 5e-3
FIRST_SEED = 100
COUNTED, SOUGHT = range(FIRST_SEED, FIRST_SEED + 3), range(FIRST_SEED, FIRST_SEED + 4)
PROBES = 200
SHIFT = 3  # of labels that mean something else
LOUD = 5.0  # noise in weights, in deviations of these


@dataclass(frozen=True)
class Data:
    """Images (n, 1, 8, 8) and labels (n,)."""

    x: Tensor
    y: Tensor

    def some(self, own: IntArray) -> Data:
        """Return the images at some places."""
        return Data(self.x[own], self.y[own])

    def of(self, classes: Iterable[int]) -> Data:
        """Return the images of some classes."""
        return self.some(np.flatnonzero(np.isin(self.y.numpy(), list(classes))))


def data() -> tuple[Data, Data]:
    """Return what clients are trained on, and what they are tested on."""
    x, y = (torch.from_numpy(array) for array in digits.images())
    cut = digits.TRAINED
    return Data(x[:cut], y[:cut]), Data(x[cut:], y[cut:])


def trained(own: Data, seed: int, *, steps: int = STEPS) -> nn.Module:
    """Return a perceptron trained on some images."""
    torch.manual_seed(seed)
    return taught(digits.build(), own, steps)


def taught(model: nn.Module, own: Data, steps: int) -> nn.Module:
    """Train a model on some images, by batches that are drawn at random."""
    adam = torch.optim.Adam(model.train().parameters(), lr=RATE)
    for _ in range(steps):
        batch = torch.randint(len(own.x), (BATCH,))
        adam.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(own.x[batch]), own.y[batch]))
        adam.step()
    return model.eval()


def dirichlet(labels: IntArray, alpha: float, clients: int, seed: int) -> list[IntArray]:
    """Return each client's places, every class dealt out by a Dirichlet draw."""
    rng = np.random.default_rng(seed)
    parts: list[list[IntArray]] = [[] for _ in range(clients)]
    for each in range(CLASSES):
        own = rng.permutation(np.flatnonzero(labels == each))
        cuts = (np.cumsum(rng.dirichlet([alpha] * clients)) * len(own)).astype(int)[:-1]
        for part, places in zip(parts, np.split(own, cuts), strict=True):
            part.append(places)
    return [np.concatenate(part) for part in parts]


def disjoint(labels: IntArray, clients: int) -> list[IntArray]:
    """Return each client's places, every class one client's alone."""
    return [np.flatnonzero(labels * clients // CLASSES == k) for k in range(clients)]


SPLITS: Mapping[str, Callable[[IntArray, int], list[IntArray]]] = {
    "Dir(0.1)": lambda labels, seed: dirichlet(labels, 0.1, 4, seed),
    "Dir(0.5)": lambda labels, seed: dirichlet(labels, 0.5, 4, seed),
    "Dir(5)": lambda labels, seed: dirichlet(labels, 5.0, 4, seed),
    "2, disjoint": lambda labels, seed: disjoint(labels, 2),
    "5, disjoint": lambda labels, seed: disjoint(labels, 5),
}


UNEVEN = ((20, 300), (50, 900), (150, 100), (400, 300), (800, 600))  # samples, steps


def uneven_accuracies(seed: int) -> tuple[float, float, float]:
    """Return the best client's and the ensembles' accuracies in % where some know much more."""
    train, test = data()
    rng = np.random.default_rng(seed)
    each = [
        trained(train.some(rng.permutation(len(train.x))[:own]), seed + k, steps=steps)
        for k, (own, steps) in enumerate(UNEVEN)
    ]
    asked, told = ([model(x).detach() for model in each] for x in (train.x[:PROBES], test.x))
    best = max(_ensemble_accuracy([own], Averaging((1.0,)), test) for own in told)
    alike, even = Averaging((1.0,) * len(each)), Averaging(tuple(pooled_weights(asked)))
    first, second = (_ensemble_accuracy(told, own, test) for own in (alike, even))
    return best, first, second


def ensemble_accuracies(split: str, seed: int) -> tuple[float, float, float]:
    """Return an ensemble's accuracy in %: clients alike, by their voices, by classes."""
    train, test = data()
    parts = [own for own in SPLITS[split](train.y.numpy(), seed) if len(own)]
    counts = np.array([np.bincount(train.y[own], minlength=CLASSES) for own in parts])
    models = [trained(train.some(own), seed + k) for k, own in enumerate(parts)]
    asked, told = ([model(x).detach() for model in models] for x in (train.x[:PROBES], test.x))
    alike = Averaging((1.0,) * len(parts))
    even = Averaging(tuple(pooled_weights(asked)))
    by_class = replace(alike, class_weights=counts / counts.sum(0))
    first, second, third = (_ensemble_accuracy(told, own, test) for own in (alike, even, by_class))
    return first, second, third


def _ensemble_accuracy(each: Sequence[Tensor], averaging: Averaging, test: Data) -> float:
    weights = ensemble_weights(averaging, range(len(each)), CLASSES)
    return 100 * float((decisions_of(mean_outputs(each, weights)) == test.y).float().mean())


def _odd_labels(train: Data, seed: int) -> nn.Module:
    return trained(Data(train.x, (train.y + SHIFT) % CLASSES), seed)


def _with_noise(train: Data, seed: int) -> nn.Module:
    model = trained(train, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(LOUD * parameter.std() * torch.randn_like(parameter))
    return model


ODD: Mapping[str, Callable[[Data, int], nn.Module]] = {
    "untrained": lambda train, seed: trained(train, seed, steps=0),
    "noise in its weights": _with_noise,
    "other labels": _odd_labels,
    "one class": lambda train, seed: trained(train.of({SHIFT}), seed),
    "none: two classes": lambda train, seed: trained(train.of({8, 9}), seed),
    "none: all classes": trained,
}
OTHERS: Mapping[str, Sequence[Iterable[int]]] = {
    "all classes": [range(CLASSES)] * 3,
    "seven classes each": [[(c + 3 * k) % CLASSES for c in range(7)] for k in range(3)],
    "classes of their own": [range(4), range(4, 7), range(7, 10)],
}


def found_odd(others: str, odd: str, seed: int) -> list[tuple[int, int]]:
    """Return for every source of probes if the odd client is reported, and how many others are."""
    train, _ = data()
    good = [trained(train.of(own), seed * 10 + k) for k, own in enumerate(OTHERS[others])]
    models = [*good, ODD[odd](train, seed * 10 + len(good))]
    reported = [
        outliers([model(probes).detach() for model in models])
        for probes in probe_sources().values()
    ]
    is_found = [len(good) in numbers for numbers in reported]
    return [(int(f), len(numbers) - f) for f, numbers in zip(is_found, reported, strict=True)]


@cache
def probe_sources() -> dict[str, Tensor]:
    """Return the inputs that clients are asked: real ones, and noise."""
    _, test = data()
    real = test.x[:PROBES]
    like = (test.x[:2],)
    noise = noise_probes(like, PROBES, mean=0.3, std=0.35, seed=FIRST_SEED, tokens=None)
    return {"real inputs": real, "noise": noise.inputs[0]}


def class_count_rows() -> Iterator[list[str]]:
    """Yield the table of ensembles."""
    yield ["clients", "equal mean of logits", "by their voices", "by class"]
    for split in SPLITS:
        each = np.array([ensemble_accuracies(split, seed) for seed in COUNTED])
        yield [split, *(f"{mean:.1f}" for mean in each.mean(0))]


def uneven_rows() -> Iterator[list[str]]:
    """Yield the table of clients that were trained on few or many samples, for long or not."""
    yield ["seed", "best client", "equal mean of logits", "by their voices"]
    for seed in COUNTED:
        yield [str(seed), *(f"{own:.1f}" for own in uneven_accuracies(seed))]


def outlier_rows() -> Iterator[list[str]]:
    """Yield the table of odd clients."""
    yield ["others", "odd client", *(f"{s}: found, accused" for s in probe_sources())]
    for others, odd in product(OTHERS, ODD):
        counts = np.sum([found_odd(others, odd, seed) for seed in SOUGHT], axis=0)
        yield [others, odd, *(f"{f} of {len(SOUGHT)}, {accused}" for f, accused in counts)]


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    for rows in (class_count_rows(), uneven_rows(), outlier_rows()):
        print_table(rows)


def print_table(rows: Iterator[Sequence[str]]) -> None:
    """Print rows as a Markdown table, each when it is there; the first is the header."""
    print(_line(header := next(rows)), _line(["---"] * len(header)), sep="\n")
    for row in rows:
        print(_line(row), flush=True)
    print()


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
