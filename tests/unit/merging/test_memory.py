"""What a merge holds in memory while it is at work."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.merging import Merge


class Net(nn.Sequential):
    """A small perceptron."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("is_run", [False, True])
def test_the_module_of_the_plan_is_gone_while_clients_that_are_not_run_are_matched(
    is_run: bool,
) -> None:
    built: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        net = Net()
        built.append(weakref.ref(net))
        return net

    held: set[bool] = set()

    def hear(step: str, done: float, total: int) -> None:
        if step == "matching":
            gc.collect()
            held.add(built[0]() is not None)

    states: list[Mapping[str, torch.Tensor]] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(Net().state_dict())
    merge = match(
        states,
        model=ModelCode(build, {}, ((2, 6),)),
        probe="noise" if is_run else "none",
        max_growth=1,
        progress=hear,
    )
    assert isinstance(merge, Merge)
    assert held == {is_run}
