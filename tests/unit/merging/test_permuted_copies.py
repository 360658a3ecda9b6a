"""Permuted copies of every architecture merge back to the same function at the same width."""

import numpy as np
import pytest
import torch

from fedmerge.api import match
from fedmerge.merging import MatchOptions
from tests.clients import clients_of, loaded, noisy, permuted, relative_moves, spoil_units
from tests.zoo import ZOO, run

NAMES = pytest.mark.parametrize("name", list(ZOO))
TIGHT = 1e-9  # float64: sums of up to a few hundred products


@NAMES
@pytest.mark.parametrize("count", [2, 3, 16])
def test_permuted_copies_merge_back_to_the_function(name: str, count: int) -> None:
    entry = ZOO[name]
    model, states = clients_of(entry, count)
    merge = match(states)
    assert merge.growth == 1
    assert all(group.match_rate == 1 for group in merge.groups)
    merged = loaded(entry, merge.state_dict())
    expected = run(model, entry.inputs())
    assert torch.allclose(run(merged, entry.inputs()), expected, rtol=0, atol=TIGHT)


@NAMES
def test_averaging_permuted_copies_element_by_element_gives_another_function(name: str) -> None:
    entry = ZOO[name]
    model, states = clients_of(entry, 3)
    merged = loaded(entry, match(states, MatchOptions(method="average")).state_dict())
    expected = run(model, entry.inputs())
    assert (run(merged, entry.inputs()) - expected).abs().max() > 1e-3


@NAMES
@pytest.mark.parametrize("count", [2, 5])
def test_zero_and_equal_units_do_not_disturb_the_merge(name: str, count: int) -> None:
    entry = ZOO[name]
    original = entry.fresh(seed=1).state_dict()
    spoilt = spoil_units(original, seed=3)
    assert any(not torch.equal(spoilt[key], original[key]) for key in original)
    states = [spoilt, *(permuted(spoilt, seed)[0] for seed in range(1, count))]
    merge = match(states)
    assert merge.growth == 1
    expected = run(loaded(entry, spoilt), entry.inputs())
    result = run(loaded(entry, merge.state_dict()), entry.inputs())
    assert torch.allclose(result, expected, rtol=0, atol=TIGHT)


@NAMES
def test_noise_does_not_change_the_assignments(name: str) -> None:
    entry = ZOO[name]
    state = entry.fresh(seed=1).state_dict()
    copies = [(state, {}), *(permuted(state, seed) for seed in range(1, 4))]
    states = [noisy(copy, 1e-3, seed) for seed, (copy, _) in enumerate(copies)]
    merge = match(states)
    moves = [move for _, move in copies]
    assert merge.growth == 1
    for group in merge.groups:
        assigned = [placement[group.name].indices for placement in merge.placements]
        first, *others = relative_moves(assigned, moves, group.name)
        assert all(np.array_equal(first, other) for other in others)
        assert not all(np.array_equal(assigned[0], other) for other in assigned[1:])


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_smaller_dtypes_come_back_as_they_were(name: str, dtype: torch.dtype) -> None:
    entry = ZOO[name]
    _, states = clients_of(entry, 3)
    small = [
        {k: t.to(dtype) if t.is_floating_point() else t for k, t in state.items()}
        for state in states
    ]
    merge = match(small)
    assert merge.growth == 1
    for key, tensor in merge.state_dict().items():
        assert tensor.dtype == small[0][key].dtype
        assert torch.equal(tensor, small[0][key])
