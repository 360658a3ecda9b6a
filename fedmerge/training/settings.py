"""How clients train: the options, the paper's defaults, and what they mean for each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from fedmerge.errors import UsageError
from fedmerge.types.rules import Rule, number, whole

Optimizer: TypeAlias = Literal["sgd", "adam"]
Stage: TypeAlias = Literal["whole", "partial", "last"]


@dataclass(frozen=True)
class TrainSettings:
    """One client's training; the defaults are those of the paper's appendix for images.

    The paper names no batch size, and 20 epochs as the best of FedAvg and FedProx; FedMA gains
    from more.
    """

    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9  # of SGD
    weight_decay: float = 1e-4
    epochs: int = 20
    batch_size: int = 32
    proximal: float = 0.0  # FedProx's mu: adds mu/2 ‖w - w_start‖² to the loss
    clip_norm: float | None = None  # the largest norm of a batch's gradient
    seed: int = 0
    mixed_precision: bool = False  # where the device has it
    partial_weight_decay: float = 0.0  # while some layers are frozen and more than the last train
    last_rate_factor: float = 0.1  # the rest: where only the last layer trains
    last_epochs_factor: int = 3
    last_weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _RULES.items():
            value = getattr(self, name)
            if not is_valid(value):
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} is {value!r}, expected {expected}")

    def at(self, stage: Stage) -> TrainSettings:
        """Return the settings with rate, epochs and weight decay of a stage.

        `whole`: nothing is frozen; `partial`: matched layers are; `last`: all but the last are.
        """
        return replace(self, **_STAGES[stage](self))


def default_settings(task: str) -> TrainSettings:
    """Return the paper's settings of a task, those of images for the user's own."""
    return TrainSettings(**_PAPER_CHANGES.get(task, {}))


_PAPER_CHANGES: Mapping[str, Mapping[str, Any]] = {  # by task
    "language-model": {"learning_rate": 0.8, "last_rate_factor": 1.0},  # a constant rate
}
_STAGES: Mapping[Stage, Callable[[TrainSettings], Mapping[str, Any]]] = {
    "whole": lambda settings: {},
    "partial": lambda settings: {"weight_decay": settings.partial_weight_decay},
    "last": lambda settings: {
        "learning_rate": settings.learning_rate * settings.last_rate_factor,
        "epochs": settings.epochs * settings.last_epochs_factor,
        "weight_decay": settings.last_weight_decay,
    },
}


LARGEST = 1e30  # of any number here: float32 holds it


def _positive(value: Any) -> bool:
    return number(0, LARGEST)(value) and value > 0


_RULES: Mapping[str, Rule] = {
    "optimizer": (lambda name: name in ("sgd", "adam"), "sgd or adam"),
    "learning_rate": (_positive, f"a positive number up to {LARGEST:g}"),
    "momentum": (lambda m: number(0, 1)(m) and m < 1, "a number from 0 to below 1"),
    "weight_decay": (number(0, LARGEST), "a number from 0"),
    "epochs": (whole(1), "a whole number from 1"),
    "batch_size": (whole(1), "a whole number from 1"),
    "proximal": (number(0, LARGEST), "a number from 0"),
    "clip_norm": (lambda norm: norm is None or _positive(norm), "a positive number"),
    "seed": (whole(0), "a whole number from 0"),
    "mixed_precision": (lambda value: type(value) is bool, "true or false"),
    "partial_weight_decay": (number(0, LARGEST), "a number from 0"),
    "last_rate_factor": (_positive, "a positive number"),
    "last_epochs_factor": (whole(1), "a whole number from 1"),
    "last_weight_decay": (number(0, LARGEST), "a number from 0"),
}
