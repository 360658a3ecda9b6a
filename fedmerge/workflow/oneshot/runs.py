"""Runs of a model that end at one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from fedmerge.probing.calls import Call, names_of, run_heard
from fedmerge.user_code import StopRun
from fedmerge.workflow.oneshot.models import Models


def calls_of(
    models: Models, model: nn.Module, name: str, batches: Iterable[tuple[Tensor, ...]]
) -> Iterator[Call]:
    """Yield the call of a weight, given by the plan's name, in every batch; a run ends there."""
    for inputs in batches:
        found: list[Call] = []
        run_heard(model, inputs, _hear(models, name, found))
        yield from found


def _hear(models: Models, name: str, found: list[Call]) -> Callable[[Call], None]:
    def hear(call: Call) -> None:
        if models.own_names[names_of(call)[0]] == name:
            found.append(call)
            raise StopRun

    return hear
