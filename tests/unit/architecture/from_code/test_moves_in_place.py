"""Plans are checked by moving a model's units in place, and moving them back."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import permuted, plan_model, soundness, verify_plan

INPUT = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WIDTHS = {"0": 5, "2": 4}
MOVES = {name: np.roll(np.arange(width), 1) for name, width in WIDTHS.items()}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return nn.Sequential(*layers).double().eval()


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(INPUT)
    return found


def test_units_move_for_a_while_as_in_a_copy_and_then_stand_as_before() -> None:
    model = net()
    plan = plan_model(model, (INPUT,))
    assert {group.name for group in plan.groups} == set(WIDTHS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = permuted(model, plan, MOVES, WIDTHS).state_dict()
    with soundness._moved_in_place(model, plan, MOVES, WIDTHS):
        moved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.testing.assert_close(outputs(model), outputs(net()), rtol=0, atol=1e-12)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(moved[name], copy[name])
    assert not torch.equal(moved["0.weight"], before["0.weight"])
    assert torch.equal(moved["4.bias"], before["4.bias"])  # of the outputs


def test_a_check_that_holds_runs_the_model_twice_and_copies_it_once() -> None:
    model = net()
    plan = plan_model(model, (INPUT,))
    with (
        mock.patch.object(soundness, "run", side_effect=soundness.run) as runs,
        mock.patch.object(soundness, "lowest_precision", return_value=torch.float64),
        mock.patch.object(soundness, "copied", side_effect=vars(soundness)["copied"]) as copies,
    ):
        verify_plan(model, plan, (INPUT,), rng=np.random.default_rng(0))
    assert (runs.call_count, copies.call_count) == (2, 1)
