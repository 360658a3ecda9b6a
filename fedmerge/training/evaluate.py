"""How well a model does on samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedmerge.errors import TrainingCodeError, TrainingError
from fedmerge.training.shards import Shard
from fedmerge.training.tasks import LearningTask, count_predictions
from fedmerge.types.arrays import IntArray
from fedmerge.user_code import parts_of, placed, user_code

_HINT = "samples reach the model as they are stored; images with channels last need --channels-last"

EVALUATION_BATCH = 256  # samples; changes the time and the memory, not the result


@dataclass(frozen=True)
class Evaluation:
    """Means over all predictions of a shard."""

    loss: float
    metrics: Mapping[str, float]
    samples: int


class Means:
    """Loss and metrics of batches on their way to the means over all predictions."""

    def __init__(self, task: LearningTask) -> None:
        self._task = task
        self._sums: dict[str, float] = defaultdict(float)
        self._total = 0

    def add(self, outputs: Any, targets: torch.Tensor) -> None:
        """Count a batch: what the model made of it, and what it should be."""
        with calling_task(self._task):
            loss = float(self._task.loss(outputs, targets))
            means = {"loss": loss, **self._task.metrics(outputs, targets)}
            count = count_predictions(self._task, targets)
            self._total += count
            for name, mean in means.items():
                # Means of nothing are NaN.
                self._sums[name] += float(mean) * count if count else 0.0

    def evaluation(self, shard: Shard) -> Evaluation:
        """Return the means, once all samples of a shard were counted."""
        if not self._total:
            raise TrainingError(f"{shard.origin or shard.name}: y has nothing to be predicted")
        means = {name: value / self._total for name, value in self._sums.items()}
        return Evaluation(means.pop("loss"), means, len(shard))


def evaluate(
    model: nn.Module,
    shard: Shard,
    task: LearningTask,
    *,
    device: str = "cpu",
    batch_size: int = EVALUATION_BATCH,
) -> Evaluation:
    """Return the mean loss and metrics of a model over a shard, in evaluation mode."""
    means = Means(task)
    with torch.no_grad(), evaluating(placed(model, device)), naming(shard):
        for rows in batches(0, len(shard), batch_size):
            x, y = shard.batch(rows, device)
            means.add(call_model(model, x), y)
    return means.evaluation(shard)


def try_model(
    model: nn.Module, shard: Shard, task: LearningTask, *, training: bool, device: str = "cpu"
) -> None:
    """Raise what training on a shard, or evaluation, would: a few of its samples tell.

    Those with the smallest and the largest target are among them. The model is left in the mode.
    """
    with user_code("the model can't be put into the mode", of=model, error=TrainingCodeError):
        placed(model, device).train(training)
    with torch.no_grad(), naming(shard):
        x, y = shard.batch(shard.extreme_rows(), device)
        outputs = call_model(model, x)
        if not training:
            Means(task).add(outputs, y)
            return
        with calling_task(task):
            task.loss(outputs, y)


def batches(start: int, stop: int, size: int) -> Iterator[IntArray]:
    """Yield the rows from start to stop, so many at a time."""
    for begin in range(start, stop, size):
        yield np.arange(begin, min(begin + size, stop))


def call_model(model: nn.Module, x: torch.Tensor) -> Any:
    """Return what the model makes of a batch, or say that it cannot take it."""
    kind = str(x.dtype).removeprefix("torch.")
    what = f"the model fails on samples of shape {tuple(x.shape)} and type {kind}"
    with user_code(what, of=model, error=TrainingCodeError, hint=_HINT):
        return model(x)


def calling_task(task: LearningTask) -> user_code:
    """Return a block in which it is the task that fails, be it the user's own."""
    return user_code("the task fails", of=task, error=TrainingCodeError)


@contextmanager
def naming(shard: Shard) -> Iterator[None]:
    """Put the shard's file in front of what is wrong with its samples."""
    try:
        yield
    except TrainingError as error:
        raise error.within(shard.origin or shard.name) from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode for a while."""
    before = {module: module.training for _, module in parts_of(model)}
    with user_code("the model can't be put into evaluation mode", of=model):
        model.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
