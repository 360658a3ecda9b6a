"""How well models do together: the mean of their outputs, with one of them in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.training.evaluate import (
    EVALUATION_BATCH,
    Evaluation,
    Means,
    batches,
    call_model,
    evaluating,
    naming,
)
from fedmerge.training.shards import Shard
from fedmerge.training.tasks import Classification, LearningTask, logits_of
from fedmerge.user_code import placed

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
) -> EnsembleEvaluation:
    """Evaluate models alone, and the mean of their outputs (logits, for the built-in tasks).

    Each model is built, run and dropped before the next. Sums of outputs are kept for as many
    samples as `held` numbers suffice for; all models are built again for those that follow.
    """
    given = weights or [1.0] * len(builds)
    shares = [weight / sum(given) for weight in given]
    alone, together = [Means(task) for _ in builds], Means(task)
    start = 0
    while start < len(shard):
        block = _Block(shard, task, start, len(shard), batch_size, held, device)
        with torch.no_grad(), naming(shard):
            for build, share, means in zip(builds, shares, alone, strict=True):
                block.add(build(), share, means)
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
    return pytree.tree_map(lambda leaf: leaf.cpu() * share if _is_float(leaf) else leaf, outputs)


def _added(sums: Any, outputs: Any) -> Any:
    """Return the sums of the floating-point tensors; of the rest, the first model's."""
    try:
        return pytree.tree_map(lambda a, b: a + b if _is_float(a) else a, sums, outputs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TrainingError(
            f"the models' outputs differ in shape, so they have no mean: {error}"
        ) from error


def _size(outputs: Any) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(outputs) if _is_float(leaf))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
