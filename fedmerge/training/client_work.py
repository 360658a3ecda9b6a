"""What one client does for one step, as work that any engine can run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.training.evaluation import evaluate
from fedmerge.training.local_training import load_arrays, train_model
from fedmerge.training.samples import Preparation
from fedmerge.training.settings import TrainSettings, limited_threads
from fedmerge.training.shards import EVALUATION_KEYS, SHARD_KEYS, Keys, Shard, read_shard
from fedmerge.training.tasks import count_classes, find_task
from fedmerge.user_code import seeded
from fedmerge.values.wording import Progress
from fedmerge.values.work import Arrays, JsonObject, Place, WorkResult

TRAIN = "fedmerge.training.worker_entry:train"
EVALUATE = "fedmerge.training.client_work:evaluate_model"


@dataclass(frozen=True)
class ClientWork:
    """All that a client must know besides the weights; goes through JSON.

    `builder` names a function `build(shapes, **arguments)` that returns the module whose tensors
    have these shapes ({name: shape}); it knows the user's model and how to resize it.
    """

    client: str
    builder: str  # "package.module:name"
    shard: str  # a file, or the user's own function by reference
    arguments: Mapping[str, Any] = field(default_factory=dict)
    task: str = "classification"
    training: TrainSettings = field(default_factory=TrainSettings)
    frozen: tuple[str, ...] = ()
    preparation: Preparation = field(default_factory=Preparation)

    def to_json(self) -> dict[str, Any]:
        """Return the settings of a task."""
        return asdict(self)

    @staticmethod
    def from_json(values: JsonObject) -> ClientWork:
        """Return what `to_json` was made of."""
        training = TrainSettings(**values["training"])
        preparation = Preparation(
            tuple(values["preparation"]["mean"]),
            tuple(values["preparation"]["std"]),
            values["preparation"]["channels_last"],
        )
        own = {"frozen": tuple(values["frozen"]), "training": training, "preparation": preparation}
        return ClientWork(**{**values, **own})


def train(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    """Train the model that has the given weights on the client's shard.

    Returns the tensors that were not frozen, and as values the losses of the epochs, the number of
    samples, the class counts (None if the task has no classes) and the seconds of training.
    """
    deadline = None if place.timeout is None else time.monotonic() + place.timeout
    work = ClientWork.from_json(settings)
    shard, task = work_shard(work, SHARD_KEYS), find_task(work.task)
    model, unsaid = _built(work, arrays, place)
    trained = train_model(
        model,
        shard,
        task,
        work.training,
        frozen=work.frozen,
        place=place,
        progress=_until(deadline),
    )
    counts = count_classes(task, shard.targets)
    values = {
        "losses": trained.losses,
        "samples": trained.samples,
        "class_counts": None if counts is None else counts.tolist(),
        "training_seconds": trained.seconds,
    }
    own = {name: array for name, array in trained.arrays.items() if name not in unsaid}
    return WorkResult(own, values)


def evaluate_model(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    """Evaluate the model that has the given weights: no arrays, the loss and metrics as values."""
    work = ClientWork.from_json(settings)
    shard = work_shard(work, EVALUATION_KEYS)
    with limited_threads(place.threads):
        model, _ = _built(work, arrays, place)
        found = evaluate(model, shard, find_task(work.task), device=place.device)
    return WorkResult({}, {"loss": found.loss, "samples": found.samples, **found.metrics})


def work_shard(work: ClientWork, keys: Keys) -> Shard:
    """Return the samples that the work is about."""
    return read_shard(work.shard, client=work.client, keys=keys, preparation=work.preparation)


def _built(work: ClientWork, arrays: Arrays, place: Place) -> tuple[nn.Module, frozenset[str]]:
    """Return the model with its weights, and what these say nothing of."""
    build = _find_builder(work.builder)
    shapes = {name: array.shape for name, array in arrays.items()}
    with limited_threads(place.threads), seeded(work.training.seed):
        model = build(shapes, **work.arguments)
    return model, load_arrays(model, arrays)


def _find_builder(reference: str) -> Callable[..., nn.Module]:
    """Return fedmerge's own function that calls the user's: what fails in it is no client's."""
    module, _, name = reference.partition(":")
    build: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    return build


def _until(deadline: float | None) -> Progress:
    """Return a listener that stops training when its time is over."""

    def check(step: str, done: float, total: int) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise TrainingError(f"the time was over after {done:g} of {total} batches")

    return check
