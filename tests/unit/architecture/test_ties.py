"""Modules that a net uses twice: one tensor, one layout, and a plan that can be written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedmerge.architecture import plan_from_json, plan_to_json
from fedmerge.errors import ArchitectureError
from tests.clients import permuted, plan_of
from tests.zoo import Entry, run


def with_shared(kind: str) -> nn.Module:
    shared: nn.Module
    if kind == "linear":
        shared = nn.Linear(9, 9)
        middle = [shared, nn.ReLU(), shared]
    elif kind == "linear with norms":
        shared = nn.Linear(9, 9)
        middle = [shared, nn.BatchNorm1d(9), shared, nn.BatchNorm1d(9)]
    elif kind == "linear and norm":
        shared, norm = nn.Linear(9, 9), nn.BatchNorm1d(9)
        middle = [shared, norm, nn.ReLU(), shared, norm]
    else:
        shared = nn.BatchNorm1d(9) if kind == "batch norm" else nn.PReLU(9)
        middle = [shared, nn.ReLU(), nn.Linear(9, 9), shared]
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), *middle, nn.ReLU(), nn.Linear(9, 3))


KINDS = ["linear", "linear with norms", "linear and norm", "batch norm", "prelu"]


@pytest.mark.parametrize("alphabetical", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_modules_make_one_group_and_keep_the_outputs(kind: str, alphabetical: bool) -> None:
    entry = Entry(lambda: with_shared(kind), (6,), 1)
    model, copy = entry.fresh(1), entry.fresh(2)
    state = model.state_dict()
    stored = dict(sorted(state.items())) if alphabetical else dict(state)
    plan, widths = plan_of(stored)
    assert list(widths.values()) == [9]
    moved, _ = permuted(stored, 4)
    copy.load_state_dict(moved)
    assert torch.allclose(run(model, entry.inputs()), run(copy, entry.inputs()), 0, 1e-9)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_norm_behind_a_shared_layer_is_not_folded_twice() -> None:
    plan, _ = plan_of(with_shared("linear with norms").state_dict())
    assert plan.norms == ()
    once, _ = plan_of(with_shared("linear and norm").state_dict())
    assert [(norm.producer, norm.mean) for norm in once.norms] == [("2.weight", "3.running_mean")]


def test_a_shared_recurrent_layer_is_one_stack() -> None:
    shared = nn.LSTM(5, 5)
    model = nn.ModuleDict({"lstm1": shared, "lstm2": shared, "fc": nn.Linear(5, 2)})
    plan, widths = plan_of(model.state_dict())
    assert widths == {}  # the first layer's input is its own output's width, hence pinned
    assert "lstm2.weight_ih_l0" not in plan.tensors


def test_one_tensor_in_two_different_roles_is_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
    )
    model[5].weight = model[3].weight
    with pytest.raises(ArchitectureError, match="used in two different ways"):
        plan_of(model.state_dict())
