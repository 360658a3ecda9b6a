"""Copies with other orders of units in every head merge back; with one for all they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.api import match
from fedmerge.architecture import solve_widths
from fedmerge.architecture.from_code import generic_model, permuted, plan_model, random_moves
from fedmerge.values import Plan, with_inside
from tests.model_zoo import ZOO

TIGHT = 1e-9  # float64: sums of up to a few hundred products
NAMES = [
    *("vit", "gpt", "transformer encoder", "encoder and decoder", "llama", "cross attention"),
    *("attention with growing heads", "attention that counts its heads"),
]


def outputs(module: nn.Module, name: str) -> Tensor:
    inputs = [x.double() if x.is_floating_point() else x for x in ZOO[name].inputs()]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of what models make inside
    try:
        with torch.no_grad():
            found: Tensor = module(*inputs)
    finally:
        torch.set_default_dtype(before)
    return found


def difference(name: str, plan: Plan, states: list[dict[str, Tensor]], expected: Tensor) -> float:
    """Return how far a merge of states by a plan is from the outputs that they have."""
    merged = ZOO[name].build().double().eval()
    merged.load_state_dict(match(states, plan=plan, max_growth=1).state_dict())
    return float((outputs(merged, name) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_copies_with_orders_of_their_own_in_every_head_merge_back(name: str) -> None:
    rng = np.random.default_rng(2)
    module = generic_model(ZOO[name].build(), torch.float64, rng=rng).eval()
    plan = plan_model(ZOO[name].build(), ZOO[name].inputs())
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    widths = solve_widths(plan, shapes, source=name)
    copies = [permuted(module, plan, random_moves(plan, widths, rng), widths) for _ in range(2)]
    expected = outputs(module, name)
    for copy in copies:
        assert torch.allclose(outputs(copy, name), expected, atol=TIGHT)
    states = [dict(each.state_dict()) for each in (module, *copies)]
    assert difference(name, plan, states, expected) < TIGHT
    assert difference(name, with_inside(plan, {}), states, expected) > 1e-3
