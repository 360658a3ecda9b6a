"""The ways through a model that has branches, so that each can be checked by numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fedmerge.errors import UserCodeError
from fedmerge.graph.model.dispatch import EagerMode, eagerly
from fedmerge.graph.model.higher_order import noting, taking
from fedmerge.graph.model.walk import copied
from fedmerge.user_code import run_model

Path = Callable[[], AbstractContextManager[None]]


def paths_of(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Path, ...]:
    """Return contexts to run a model in: one, or with `torch.cond` in it, one for each branch.

    All conditions go the same way in a context. Higher-order ops run as plain calls in it.
    """
    with noting() as met:
        try:
            with eagerly(), torch.no_grad(), EagerMode():
                run_model(copied(model), inputs)
        except UserCodeError:  # whoever runs it next says so
            return (nullcontext,)
    if not met:
        return (nullcontext,)
    branches = (True, False) if "cond" in met else (None,)
    return tuple(partial(_followed, branch) for branch in branches)


@contextmanager
def _followed(branch: bool | None) -> Iterator[None]:
    with eagerly(), taking(branch), EagerMode():
        yield
