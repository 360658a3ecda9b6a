"""Loss and metrics of models and of their ensemble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from fedmerge.errors import TrainingCodeError, TrainingError
from fedmerge.private_torch import leaves, map_leaves
from fedmerge.training.shards import Inputs, Shard
from fedmerge.training.tasks import Classification, LearningTask, count_predictions
from fedmerge.user_code import evaluating, logits_of, placed, user_code
from fedmerge.values.arrays import IntArray
from fedmerge.values.run_settings import EVALUATION_BATCH

_HINT = "samples reach the model as they are stored; images with channels last need `channels_last`"


@dataclass(frozen=True)
class InferenceCost:
    """What it costs to run a model."""

    seconds: float  # for 1,000 samples
    parameter_bytes: int  # of parameters and buffers, as they are run
    activation_bytes: int | None  # the most of new tensors at once, for the batch; None: unknown

    @property
    def bytes(self) -> int:
        """All memory that is known of."""
        return self.parameter_bytes + (self.activation_bytes or 0)


@dataclass(frozen=True)
class Evaluation:
    """Means over all predictions of a shard."""

    loss: float
    metrics: Mapping[str, float]
    samples: int
    outputs: torch.Tensor | None = field(default=None, compare=False, repr=False)  # if kept
    cost: InferenceCost | None = field(default=None, compare=False, repr=False)  # if measured


KeepRows: TypeAlias = Callable[[Any], torch.Tensor]  # a model's outputs → (rows, outputs)
KEPT_OUTPUTS = 1 << 22  # numbers of a model's outputs that are kept: 16 MB in single precision


class Means:
    """Loss and metrics of batches on their way to the means over all predictions.

    With `keep`, the first outputs are kept too, the same rows of every model.
    """

    def __init__(self, task: LearningTask, keep: KeepRows | None = None) -> None:
        self._task, self._keep = task, keep
        self._sums: dict[str, float] = defaultdict(float)
        self._total = 0
        self._kept: list[torch.Tensor] = []

    def add(self, outputs: Any, targets: torch.Tensor) -> None:
        """Count a batch: what the model made of it, and what it should be."""
        if self._keep is not None and sum(rows.numel() for rows in self._kept) < KEPT_OUTPUTS:
            self._kept.append(self._keep(outputs).cpu())
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
        kept = torch.cat(self._kept) if self._kept else None
        return Evaluation(means.pop("loss"), means, len(shard), kept)


def evaluate(
    model: nn.Module,
    shard: Shard,
    task: LearningTask,
    *,
    device: str = "cpu",
    batch_size: int = EVALUATION_BATCH,
    keep: KeepRows | None = None,
) -> Evaluation:
    """Return the mean loss and metrics of a model over a shard, in evaluation mode."""
    means = Means(task, keep)
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


def call_model(model: nn.Module, x: Inputs) -> Any:
    """Return what the model makes of a batch, or say that it cannot take it."""
    inputs = x if isinstance(x, tuple) else (x,)
    fed = [f"{tuple(i.shape)} and type {str(i.dtype).removeprefix('torch.')}" for i in inputs]
    what = f"the model fails on samples of shape {'; '.join(fed)}"
    with user_code(what, of=model, error=TrainingCodeError, hint=_HINT):
        return model(*inputs)


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


Build: TypeAlias = Callable[[], nn.Module]

HELD_OUTPUTS = 1 << 26  # numbers (256 MB in float32); changes the time, not the result


@dataclass(frozen=True)
class EnsembleEvaluation:
    """The evaluation of every model alone, and of all of them together."""

    alone: tuple[Evaluation, ...]
    together: Evaluation


def evaluate_ensemble(
    builds: Sequence[Build],
    shard: Shard,
    task: LearningTask,
    *,
    weights: Sequence[float] | None = None,
    device: str = "cpu",
    batch_size: int = EVALUATION_BATCH,
    held: int = HELD_OUTPUTS,
    keep: KeepRows | None = None,
    done: Callable[[int, nn.Module], None] = lambda number, model: None,
) -> EnsembleEvaluation:
    """Evaluate models alone, and the mean of their outputs (logits, for the built-in tasks).

    Each model is built, run and dropped before the next. Sums of outputs are kept for as many
    samples as `held` numbers suffice for; all models are built again for those that follow.
    `done` gets every model before it is dropped.
    """
    given = weights or [1.0] * len(builds)
    shares = [weight / sum(given) for weight in given]
    alone, together = [Means(task, keep) for _ in builds], Means(task, keep)
    start = 0
    while start < len(shard):
        block = _Block(shard, task, start, len(shard), batch_size, held, device)
        with torch.no_grad(), naming(shard):
            for number, (build, share) in enumerate(zip(builds, shares, strict=True)):
                model = build()
                block.add(model, share, alone[number])
                done(number, model)
                del model  # before the next is built
            for outputs, targets in zip(block.sums, block.targets, strict=True):
                together.add(outputs, targets)
        start = block.stop
    each = tuple(means.evaluation(shard) for means in alone)
    return EnsembleEvaluation(each, together.evaluation(shard))


@dataclass
class _Block:
    """Samples whose outputs are held at once; the first model's outputs say how many that are."""

    shard: Shard
    task: LearningTask
    start: int
    stop: int
    batch_size: int
    room: int  # numbers that may still be held
    device: str
    sums: list[Any] = field(default_factory=list)  # of outputs, per batch
    targets: list[torch.Tensor] = field(default_factory=list)

    def add(self, model: nn.Module, share: float, means: Means) -> None:
        """Run a model over the samples, count its outputs alone and add its share of them."""
        is_first = not self.sums
        with evaluating(placed(model, self.device)):
            for place, rows in enumerate(batches(self.start, self.stop, self.batch_size)):
                x, y = self.shard.batch(rows, self.device)
                outputs = call_model(model, x)
                means.add(outputs, y)
                part = _scaled(_averaged_part(self.task, outputs), share)
                if not is_first:
                    self.sums[place] = _added(self.sums[place], part)
                    continue
                self.sums.append(part)
                self.targets.append(y.cpu())
                self.room -= _size(part)
                if self.room < _size(part):
                    self.stop = int(rows[-1]) + 1
                    return


def _averaged_part(task: LearningTask, outputs: Any) -> Any:
    """Return what of a model's outputs is averaged: all of it for the user's own tasks."""
    return logits_of(outputs) if isinstance(task, Classification) else outputs


def _scaled(outputs: Any, share: float) -> Any:
    return map_leaves(lambda leaf: leaf.cpu() * share if _is_float(leaf) else leaf, outputs)


def _added(sums: Any, outputs: Any) -> Any:
    """Return the sums of the floating-point tensors; of the rest, the first model's."""
    try:
        return map_leaves(lambda a, b: a + b if _is_float(a) else a, sums, outputs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TrainingError(
            f"the models' outputs differ in shape, so they have no mean: {error}"
        ) from error


def _size(outputs: Any) -> int:
    return sum(leaf.numel() for leaf in leaves(outputs) if _is_float(leaf))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
