"""What clients return, compared with what they were asked for, before any of it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from fedmerge.decoding import decode_value
from fedmerge.engines import Outcome
from fedmerge.errors import TrainingError
from fedmerge.types.arrays import DType

Expected: TypeAlias = Mapping[str, tuple[tuple[int, ...], DType]]  # a tensor's shape and type


class _Training(msgspec.Struct, frozen=True):
    """What a training says beside its tensors."""

    losses: tuple[float, ...]  # of its epochs
    samples: int
    class_counts: tuple[int, ...] | None
    training_seconds: float


def problem_of_training(
    outcome: Outcome, expected: Expected, own: Mapping[str, str], *, epochs: int
) -> str:
    """Say what is wrong with what a client returned, or nothing.

    `own` are the clients' names of the model's tensors, by which `expected` calls them.
    """
    return _names_problem(outcome, expected, own) or (
        _tensors_problem(outcome, expected, own) or _values_problem(outcome, epochs)
    )


def _names_problem(outcome: Outcome, expected: Expected, own: Mapping[str, str]) -> str:
    returned: dict[str, str] = {}
    for name in outcome.arrays:
        if own.get(name) not in expected:
            why = "is frozen" if name in own else "its model does not have"
            return f"returned '{name}', which {why}; expected {_count(expected)}"
        if own[name] in returned:
            return f"returned one tensor twice, as '{returned[own[name]]}' and '{name}'"
        returned[own[name]] = name
    missing = [name for name in expected if name not in returned]
    if missing:
        return f"returned no '{missing[0]}': {len(returned)} tensors, expected {_count(expected)}"
    return ""


def _count(expected: Expected) -> str:
    return "1 tensor" if len(expected) == 1 else f"{len(expected)} tensors"


def _tensors_problem(outcome: Outcome, expected: Expected, own: Mapping[str, str]) -> str:
    for name, array in outcome.arrays.items():
        shape, dtype = expected[own[name]]
        if (array.shape, array.dtype) != (shape, dtype):
            found = f"{array.shape} of {array.dtype}"
            return f"returned '{name}' as {found}, expected {shape} of {dtype}"
    return ""


def _values_problem(outcome: Outcome, epochs: int) -> str:
    try:
        found = decode_value(outcome.values, _Training, fail=TrainingError)
    except TrainingError as error:
        return f"returned values that no training gives ({error.problem})"
    if len(found.losses) != epochs or not all(map(math.isfinite, found.losses)):
        return f"returned the losses {list(found.losses)[:5]}, expected {epochs} finite numbers"
    if found.samples < 1 or min(found.class_counts or (0,)) < 0:
        return f"returned {found.samples} samples and the class counts {found.class_counts}"
    return ""


def evaluation_values(outcome: Outcome) -> dict[str, float]:
    """Return the loss and the metrics that an evaluation gave, finite or not."""

    def fail(reason: str) -> TrainingError:
        return TrainingError(f"the evaluation returned values that none gives ({reason})")

    found = decode_value(dict(outcome.values), dict[str, float], fail=fail)
    found.pop("samples", None)
    if "loss" not in found:
        raise fail("no `loss`")
    return found
