"""What a model learns: the loss, what is measured, and how often each class occurs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from fedmerge.errors import TrainingCodeError, TrainingError, UsageError
from fedmerge.user_code import find_object, logits_of, remember, user_code
from fedmerge.values.arrays import Array, IntArray

PADDING = -100  # a target that is not predicted, as in torch


class LearningTask(Protocol):
    """Loss and metrics of a batch; the user's own tasks need these two."""

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, a scalar, from what the model returned."""

    def metrics(self, outputs: Any, targets: torch.Tensor) -> Mapping[str, float]:
        """Return means over the batch by name, e.g. the accuracy."""


class Classification:
    """One class of logits (n, classes, …) per target (n, …)."""

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        return functional.cross_entropy(_class_logits(outputs, targets), targets)

    def metrics(self, outputs: Any, targets: torch.Tensor) -> Mapping[str, float]:
        """Return the accuracy."""
        return {"accuracy": _accuracy(_class_logits(outputs, targets), targets)}

    def predictions(self, targets: torch.Tensor) -> int:
        """Return how many targets count in the means of a batch."""
        return int((targets != PADDING).sum())

    def class_counts(self, targets: Array) -> IntArray:
        """Return how often each class (largest target + 1,) occurs."""
        if targets.dtype.kind != "i":
            raise _no_classes(str(targets.dtype))
        return np.bincount(targets[targets != PADDING].reshape(-1))


class LanguageModel(Classification):
    """The next token at each step: logits (n, steps, tokens) for targets (n, steps).

    Models may also return (n·steps, tokens) or (n, tokens, steps), and a state beside the logits.
    """

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy per token."""
        logits, flat = _token_logits(outputs, targets)
        return functional.cross_entropy(logits, flat)

    def metrics(self, outputs: Any, targets: torch.Tensor) -> Mapping[str, float]:
        """Return the accuracy and the bits per character."""
        logits, flat = _token_logits(outputs, targets)
        bits = functional.cross_entropy(logits, flat).item() / math.log(2)
        return {"accuracy": _accuracy(logits, flat), "bits_per_character": bits}


TASKS: Mapping[str, LearningTask] = {
    "classification": Classification(),
    "language-model": LanguageModel(),
}


def find_task(name: str) -> LearningTask:
    """Return the task of a name, or the user's own by `module:object` or `file.py:object`."""
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise UsageError(
            f"`task` is '{name}', expected {', '.join(TASKS)} or your own as module:object"
        )
    found: Any = find_object(name, what="task")
    with user_code(f"'{name}' is no task", error=TrainingCodeError):
        task: LearningTask = found() if isinstance(found, type) else found
        missing = [m for m in ("loss", "metrics") if not callable(getattr(task, m, None))]
    if missing:
        raise UsageError(
            f"'{name}' has no method '{missing[0]}'",
            "a task has loss(outputs, targets) and metrics(outputs, targets)",
        )
    remember(task, name)
    return task


def count_classes(task: LearningTask, targets: Array) -> IntArray | None:
    """Return how often each class occurs among targets, None if the task does not say."""
    with user_code("the task can't count classes", of=task, error=TrainingCodeError):
        counter = getattr(task, "class_counts", None)
        return None if counter is None else np.asarray(counter(targets))


def count_predictions(task: LearningTask, targets: torch.Tensor) -> int:
    """Return the weight of a batch's means: its predictions, or its samples."""
    counter = getattr(task, "predictions", len)
    return int(counter(targets))


def _class_logits(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = logits_of(outputs)
    if logits.ndim < 2 or logits.shape[:1] + logits.shape[2:] != targets.shape:
        raise _mismatch(logits, targets)
    _check_range(logits.shape[1], targets)
    return logits


def _token_logits(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (n·steps, tokens) and targets (n·steps,)."""
    logits = logits_of(outputs)
    if logits.ndim == targets.ndim + 1 and logits.shape[:-1] == targets.shape:
        flat = logits.flatten(0, -2)
    elif logits.ndim == 2 and len(logits) == targets.numel():
        flat = logits
    elif logits.ndim == 3 and logits.shape[:1] + logits.shape[2:] == targets.shape:
        flat = logits.transpose(1, 2).flatten(0, 1)
    else:
        raise _mismatch(logits, targets)
    _check_range(flat.shape[1], targets)
    return flat, targets.flatten()


def _check_range(classes: int, targets: torch.Tensor) -> None:
    if targets.dtype != torch.int64:
        raise _no_classes(str(targets.dtype).removeprefix("torch."))
    wrong = targets[(targets != PADDING) & ((targets < 0) | (targets >= classes))]
    if len(wrong):
        raise TrainingError(
            f"y has the class {int(wrong[0])}, but the model has {classes} outputs",
            f"classes are numbered from 0 to {classes - 1}",
        )


def _no_classes(found: str) -> TrainingError:
    return TrainingError(
        f"y holds {found}, expected class numbers",
        "store class numbers as integers; for other targets give a task of your own: "
        "`task=file.py:object`",
    )


def _accuracy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    counted = targets != PADDING
    right = (logits.argmax(1) == targets) & counted
    return int(right.sum()) / max(int(counted.sum()), 1)


def _mismatch(logits: torch.Tensor, targets: torch.Tensor) -> TrainingError:
    return TrainingError(
        f"the model's outputs are {tuple(logits.shape)}, which does not fit "
        f"targets y of {tuple(targets.shape)}",
        "classification: outputs (n, classes) for y (n); language-model: (n, steps, tokens) for y "
        "(n, steps)",
    )
