"""Settings of local training, and of what is done about clients that fail."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from fedmerge.values.option_fields import (
    Rule,
    check_options,
    from_one,
    number,
    option,
    positive,
    seed_rule,
    whole,
)

EVALUATION_BATCH = 256  # samples; changes the time and the memory, not the result

Stage: TypeAlias = Literal["whole", "partial", "last"]


@dataclass(frozen=True)
class TrainSettings:
    """One client's training; the defaults are those of the paper's appendix for images.

    The paper names no batch size, and 20 epochs as the best of FedAvg and FedProx; FedMA gains
    from more.
    """

    optimizer: str = option(
        "How weights are trained: a class of torch.optim, in any case", "sgd", values="NAME"
    )
    optimizer_args: str | None = option("Further arguments of it", values="NAME=VALUE,…")
    scheduler: str | None = option(
        "A class of torch.optim.lr_scheduler, which takes a step after every epoch", values="NAME"
    )
    scheduler_args: str | None = option("Its arguments", values="NAME=VALUE,…")
    accumulate: int = option("Batches whose gradients make one step", 1, values="N")
    patience: int | None = option(
        "Keep the epoch's model that is best on the client's held-out samples, and stop after so "
        "many epochs that are no better",
        values="N",
    )
    learning_rate: float = option(
        "Learning rate", 0.01, values="X", unset="0.01; 0.8 for language models"
    )
    momentum: float = option("Momentum of sgd", 0.9, values="X")
    weight_decay: float = option("Weight decay while nothing is frozen", 1e-4, values="X")
    epochs: int = option("Local epochs per round", 20, values="N")
    batch_size: int = option("Samples per step", 32, values="N")
    proximal: float = 0.0  # FedProx's mu: adds mu/2 ‖w - w_start‖² to the loss
    clip_norm: float | None = option("Largest norm of a step's gradient", values="X")
    seed: int = 0
    mixed_precision: bool = option("Half-precision products where the device has them", False)
    partial_weight_decay: float = option(
        "Weight decay while matched layers are frozen", 0.0, values="X", unset="0"
    )
    last_rate_factor: float = option(
        "Rate where only the last layer trains ÷ rate",
        0.1,
        values="X",
        unset="0.1; 1 for language models",
    )
    last_epochs_factor: int = option(
        "Epochs where only the last layer trains ÷ epochs", 3, values="N"
    )
    last_weight_decay: float = option(
        "Weight decay where only the last layer trains", 1e-4, values="X"
    )

    def __post_init__(self) -> None:
        check_options(self, _RULES)

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


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _are_arguments(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(arguments_of(value), dict)
    except ValueError:
        return False


def arguments_of(text: str | None) -> dict[str, Any]:
    """Return literal values by name, as a call would have them.

    >>> arguments_of("betas=(0.9, 0.95), amsgrad=True")
    {'betas': (0.9, 0.95), 'amsgrad': True}
    """
    try:
        call = ast.parse(f"f({text or ''})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} are no arguments") from error
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError(f"{text!r} are no named arguments")
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def _positive(value: Any) -> bool:
    return number(0, LARGEST)(value) and value > 0


_RULES: Mapping[str, Rule] = {
    "optimizer": (_is_name, "a class of torch.optim, e.g. adamw"),
    "optimizer_args": (_are_arguments, "arguments such as betas=(0.9, 0.95), eps=1e-6"),
    "scheduler": (_is_name, "a class of torch.optim.lr_scheduler, e.g. StepLR"),
    "scheduler_args": (_are_arguments, "arguments such as step_size=5, gamma=0.5"),
    "accumulate": from_one(),
    "patience": from_one(),
    "learning_rate": (_positive, f"a positive number up to {LARGEST:g}"),
    "momentum": (lambda m: number(0, 1)(m) and m < 1, "a number from 0 to below 1"),
    "weight_decay": (number(0, LARGEST), "a number from 0"),
    "epochs": from_one(),
    "batch_size": from_one(),
    "proximal": (number(0, LARGEST), "a number from 0"),
    "clip_norm": (_positive, "a positive number"),
    "seed": seed_rule(),
    "partial_weight_decay": (number(0, LARGEST), "a number from 0"),
    "last_rate_factor": (_positive, "a positive number"),
    "last_epochs_factor": from_one(),
    "last_weight_decay": (number(0, LARGEST), "a number from 0"),
}


@dataclass(frozen=True)
class RetryPolicy:
    """What to do about clients that fail."""

    retries: int = option("Further tries of a client that fails", 1, values="N")
    min_clients: int = option("Fewer results than this in a round end the run", 1, values="N")
    timeout: float | None = option(
        "Longest training of one client",
        values="SECONDS",
        name="client_timeout",
    )

    def __post_init__(self) -> None:
        check_options(self, _POLICY_RULES)


_POLICY_RULES: Mapping[str, Rule] = {
    "retries": (whole(0), "a whole number from 0"),
    "min_clients": from_one(),
    "timeout": (positive, "a positive number of seconds"),
}
