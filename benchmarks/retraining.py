"""What a retraining round costs beyond the training itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import fedmerge
from benchmarks.measure import Cost, Result, in_child
from fedmerge.federated import RoundDone, RunStarted
from fedmerge.training import client_work, train_model
from fedmerge.values import Array, IntArray

OVERHEAD_BAR = 0.05
MODEL = "benchmarks.paper_models:lenet"
CLIENTS, SAMPLES, EPOCHS, CLASSES = 4, 1250, 3, 10
SKEW = 0.5  # Dirichlet concentration of each client's classes
SIDE, ZOOM = 28, 3  # pixels of an image, and of each of the 8×8 digits' pixels
REPEATS = 3  # of the run; the least of each part counts
PREPARATION = "preparation"  # what precedes the rounds


def results() -> Iterator[Result]:
    """Yield the overhead of a whole run and of each of its rounds."""
    measured = in_child(
        measure, threads=1, clients=CLIENTS, samples=SAMPLES, epochs=EPOCHS, repeats=REPEATS
    )
    title = f"retrain, LeNet, {CLIENTS} clients × {SAMPLES:,} images, {EPOCHS} epochs, 1 thread"
    training, beyond = Cost(), Cost()
    for part in measured["parts"]:
        training, beyond = training + Cost(**part["training"]), beyond + Cost(**part["beyond"])
    yield _shown(f"{title}: overhead ÷ training", training, beyond, bar=OVERHEAD_BAR)
    for part in measured["parts"]:
        own, rest = Cost(**part["training"]), Cost(**part["beyond"])
        if own.cpu:
            yield _shown(f"of it the round of {part['name']}", own, rest, bar=None)
        else:
            yield Result(f"of it {part['name']}", rest.cpu, "s", note=f"wall {rest.wall:.3g} s")


def _shown(what: str, training: Cost, beyond: Cost, *, bar: float | None) -> Result:
    """Return the overhead in CPU time, which other processes do not disturb."""
    note = f"{beyond.cpu:.3g} s beyond {training.cpu:.3g} s; in wall time "
    note += f"{beyond.wall / training.wall:.3f}"
    return Result(what, beyond.cpu / training.cpu, "", bar=bar, note=note)


def measure(clients: int, samples: int, epochs: int, repeats: int) -> dict[str, Any]:
    """Return what every part of a run took, training and the rest apart.

    Training is what happens inside `train_model`: batches, steps, and weights read out of the
    module. All else is overhead: opening shards, building models, planning, matching, averaging,
    states saved after every round, the result written. There is no evaluation. Imports are paid
    by a small run before.
    """
    least: list[Part] = []
    with tempfile.TemporaryDirectory() as folder:
        small = write_shards(Path(folder) / "small", clients=2, samples=32)
        retrained(small, Path(folder) / "small-work", epochs=1)
        shards = write_shards(Path(folder) / "shards", clients=clients, samples=samples)
        for number in range(repeats):
            parts = retrained(shards, Path(folder) / f"work-{number}", epochs=epochs)
            least = [one.least(other) for one, other in zip(least or parts, parts, strict=True)]
    return {
        "parts": [
            {"name": p.name, "training": vars(p.training), "beyond": vars(p.beyond)} for p in least
        ]
    }


@dataclass(frozen=True)
class Part:
    """A part of a run: what its training took, and what all else did."""

    name: str
    training: Cost
    beyond: Cost

    def least(self, other: Part) -> Part:
        """Return the lower of each."""
        training, beyond = self.training.least(other.training), self.beyond.least(other.beyond)
        return Part(self.name, training, beyond)


@dataclass
class Watch:
    """Splits a run into its parts as events tell of their ends."""

    parts: list[Part] = field(default_factory=list)
    began: Cost = field(default_factory=lambda: _now())
    training: Cost = field(default_factory=Cost)  # since then

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the training of every client inside."""
        with mock.patch.object(client_work, "train_model", self._train):
            yield

    def _train(self, *arguments: Any, **named: Any) -> Any:
        began = _now()
        trained = train_model(*arguments, **named)
        self.training += _since(began)
        return trained

    def hear(self, event: object) -> None:
        """End a part where an event does."""
        if isinstance(event, RunStarted):
            self.end(PREPARATION)
        elif isinstance(event, RoundDone):
            self.end(event.layer)

    def end(self, name: str) -> None:
        """End a part."""
        whole, training = _since(self.began), self.training
        beyond = Cost(whole.wall - training.wall, whole.cpu - training.cpu)
        self.parts.append(Part(name, training, beyond))
        self.began, self.training = _now(), Cost()


def retrained(shards: Path, work_dir: Path, *, epochs: int) -> Sequence[Part]:
    """Retrain from fresh models as the command does by default, and return what each part took."""
    watch = Watch()
    with watch.watching():
        fedmerge.retrain(
            [],
            [shards],
            fedmerge.RetrainOptions(training=fedmerge.TrainSettings(epochs=epochs)),
            model=fedmerge.ModelCode(MODEL, {"start": "torch"}),
            work_dir=work_dir,
            output=work_dir.with_suffix(".pt"),
            running=fedmerge.Running(device="cpu"),
            hear=watch.hear,
        )
    watch.end("the result")
    return watch.parts


def write_shards(folder: Path, *, clients: int, samples: int) -> Path:
    """Write shards of digits at random places of larger images, some classes rare in each."""
    from sklearn.datasets import load_digits

    folder.mkdir()
    digits, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    for number in range(clients):
        shares = rng.dirichlet(np.full(CLASSES, SKEW))[labels]
        chosen = rng.choice(len(labels), samples, p=shares / shares.sum())
        x = _placed(digits[chosen].reshape(samples, 8, 8) / 16, rng)
        np.savez(folder / f"c{number}.npz", x=x, y=labels[chosen])
    return folder


def _placed(digits: Array, rng: np.random.Generator) -> Array:
    """Return images (n, 1, 28, 28) of digits (n, 8, 8), each enlarged and somewhere in it."""
    large = digits.repeat(ZOOM, axis=1).repeat(ZOOM, axis=2)
    side = large.shape[1]
    images = np.zeros((len(large), 1, SIDE, SIDE), dtype=np.float32)
    corners: IntArray = rng.integers(0, SIDE - side + 1, (len(large), 2))
    for image, digit, (top, left) in zip(images, large, corners, strict=True):
        image[0, top : top + side, left : left + side] = digit
    return images


def _now() -> Cost:
    return Cost(time.perf_counter(), time.process_time())


def _since(began: Cost) -> Cost:
    now = _now()
    return Cost(now.wall - began.wall, now.cpu - began.cpu)
