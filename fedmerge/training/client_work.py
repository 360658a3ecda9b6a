"""What one client does for one step, as work that any engine can run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import nn

from fedmerge.errors import FedmergeError, TrainingError, UserCodeError
from fedmerge.training.data_formats import Reading
from fedmerge.training.evaluation import evaluate, try_model
from fedmerge.training.local_training import (
    limited_threads,
    load_arrays,
    make_optimizer,
    make_scheduler,
    train_model,
)
from fedmerge.training.samples import Preparation
from fedmerge.training.shards import (
    EVALUATION_KEYS,
    SHARD_KEYS,
    Keys,
    Shard,
    read_shard,
    source_digest,
)
from fedmerge.training.tasks import count_classes, find_task
from fedmerge.user_code import derived_seed, is_handed_over, seeded
from fedmerge.values.arrays import IntArray
from fedmerge.values.run_settings import TrainSettings
from fedmerge.values.wording import Progress
from fedmerge.values.work import Arrays, JsonObject, Place, WorkResult

LOOK = "fedmerge.training.client_work:look"
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
    keeps_class_counts: bool = False  # to itself
    held_out: float = 0.0  # share of its samples that it does not train on
    reading: Reading = field(default_factory=Reading)

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
        reading = Reading(
            tuple(values["reading"]["x_keys"]),
            values["reading"]["y_key"],
            tuple(values["reading"]["classes"]),
        )
        own: dict[str, Any] = {
            "frozen": tuple(values["frozen"]),
            "training": training,
            "preparation": preparation,
        }
        own["reading"] = reading
        return ClientWork(**{**values, **own})


def look(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    """Try the model on the client's shard, and say what a server has to know of it.

    The values are how many samples there are, how many of each class (None if the task has no
    classes, or the client keeps that to itself), a digest that tells whether data changed, and
    what the model is fed with. Data that do not fit the model are `refused` with a reason: no
    later attempt can do better. What the client's own code raises is left to the engine.
    """
    work = ClientWork.from_json(settings)
    try:
        shard, _ = _training_parts(work)
    except UserCodeError:
        raise
    except FedmergeError as error:
        return _refused(error)
    try:
        counts = _try_shard(work, shard, place)
    except FedmergeError as error:
        return _refused(error)
    fed, _ = shard.batch(np.arange(1), "cpu")
    inputs = fed if isinstance(fed, tuple) else (fed,)
    values = {
        "samples": len(shard),
        "class_counts": None if counts is None or work.keeps_class_counts else counts.tolist(),
        "sha256": shard.sha256() if is_handed_over(work.shard) else source_digest(work.shard),
        "shapes": [list(own.shape) for own in inputs],
        "dtypes": [str(own.dtype).removeprefix("torch.") for own in inputs],
        "stored": str(shard.x.dtype),
    }
    return WorkResult({}, values)


def _refused(error: FedmergeError) -> WorkResult:
    refusal = {"problem": error.problem, "hint": error.hint, "details": error.details}
    return WorkResult({}, {"refused": refusal})


def _try_shard(work: ClientWork, shard: Shard, place: Place) -> IntArray | None:
    """Let the model as it is built train on a few samples; return how often each class occurs."""
    task = find_task(work.task)
    with limited_threads(place.threads), seeded(work.training.seed, place.device):
        model = _find_builder(work.builder)({}, **work.arguments)
        make_scheduler(make_optimizer(list(model.parameters()), work.training), work.training)
        try_model(model, shard, task, training=True, device=place.device)
        return count_classes(task, shard.targets)


def train(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    """Train the model that has the given weights on the client's shard.

    Returns the tensors that were not frozen, and as values the losses of the epochs, the number of
    samples and the seconds of training.
    """
    deadline = None if place.timeout is None else time.monotonic() + place.timeout
    work = ClientWork.from_json(settings)
    (shard, held), task = _training_parts(work), find_task(work.task)
    model, unsaid = _built(work, arrays, place)
    trained = train_model(
        model,
        shard,
        task,
        work.training,
        frozen=work.frozen,
        held=held,
        place=place,
        progress=_until(deadline),
    )
    values = {
        "losses": trained.losses,
        "samples": trained.samples,
        "training_seconds": trained.seconds,
    }
    own = {name: array for name, array in trained.arrays.items() if name not in unsaid}
    return WorkResult(own, values)


def evaluate_model(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    """Evaluate the model that has the given weights: no arrays, the loss and metrics as values.

    It runs on what a client holds out of its samples, if it does, else on evaluation data.
    """
    work = ClientWork.from_json(settings)
    _, held = _training_parts(work) if work.held_out else (None, None)
    shard = held or work_shard(work, EVALUATION_KEYS)
    with limited_threads(place.threads):
        model, _ = _built(work, arrays, place)
        found = evaluate(model, shard, find_task(work.task), device=place.device)
    return WorkResult({}, {"loss": found.loss, "samples": found.samples, **found.metrics})


def _training_parts(work: ClientWork) -> tuple[Shard, Shard | None]:
    """Return what a client trains on, and what it holds out: the same in every round."""
    shard = work_shard(work, SHARD_KEYS)
    if not work.held_out:
        return shard, None
    return shard.split(work.held_out, derived_seed(0, "held out", work.client))


def work_shard(work: ClientWork, keys: Keys) -> Shard:
    """Return the samples that the work is about."""
    with seeded(work.training.seed):  # the user's function may draw its views
        return read_shard(
            work.shard,
            client=work.client,
            keys=keys,
            preparation=work.preparation,
            reading=work.reading,
        )


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
