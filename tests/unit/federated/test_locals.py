"""Placing, cutting and padding are inverse to each other."""

from __future__ import annotations

import numpy as np
import pytest

import fedmerge
from fedmerge.architecture import solve_widths
from fedmerge.federated import LocalModel, cut_ties, local_arrays, pad_ties, place_units
from fedmerge.values import Array, Assignment
from tests.unit.federated.nets import plan_of, state_of


def arrays_of(net: str) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in state_of(net, 0).items()}


def widths_of(plan: fedmerge.Plan, arrays: dict[str, Array]) -> dict[str, int]:
    return solve_widths(plan, {n: a.shape for n, a in arrays.items()}, source="test")


@pytest.mark.parametrize("net", ["mlp", "Lenet", "Residual", "Chars"])
def test_cutting_gives_back_what_was_placed(net: str) -> None:
    plan, arrays = plan_of(net), arrays_of(net)
    widths = widths_of(plan, arrays)
    rng = np.random.default_rng(0)
    placement = {g: Assignment(rng.permutation(w + 3)[:w], w + 3) for g, w in widths.items()}
    placed = place_units(LocalModel("a", arrays), plan, placement, widths)
    assert widths_of(plan, dict(placed.arrays)) == {g: w + 3 for g, w in widths.items()}
    back = local_arrays(placed.arrays, plan, placement)
    for name in plan.tensors:
        assert np.array_equal(back[name], arrays[name])
    others = {g: Assignment(np.roll(a.indices, 1), a.width) for g, a in placement.items()}
    wrong = local_arrays(placed.arrays, plan, others)
    assert any(not np.array_equal(wrong[name], arrays[name]) for name in plan.tensors)


def test_groups_are_placed_one_after_the_other() -> None:
    plan, arrays = plan_of("Lenet"), arrays_of("Lenet")
    widths = widths_of(plan, arrays)
    rng = np.random.default_rng(1)
    placement = {g: Assignment(rng.permutation(w + 2)[:w], w + 2) for g, w in widths.items()}
    at_once = place_units(LocalModel("a", arrays), plan, placement, widths)
    model = LocalModel("a", arrays)
    for group, assignment in placement.items():
        model = place_units(model, plan, {group: assignment}, widths)
        widths = {**widths, group: assignment.width}
    for name in plan.tensors:
        assert np.array_equal(model.arrays[name], at_once.arrays[name])


def test_tied_layers_are_padded_to_the_widest_and_cut_again() -> None:
    plan, arrays = plan_of("Chars"), arrays_of("Chars")
    widths = widths_of(plan, arrays)
    [tie] = plan.same_width
    wider = {tie[0]: Assignment(np.arange(4), 6)}
    mixed = place_units(LocalModel("a", arrays), plan, wider, widths).arrays
    uneven = {**widths, tie[0]: 6}
    padded = pad_ties(mixed, plan, uneven)
    assert padded["rnn.weight_hh_l0"].shape == (24, 6)
    assert padded["rnn.weight_hh_l1"].shape == (24, 6)
    assert padded["out.weight"].shape == (5, 6)
    back = cut_ties(padded, plan, uneven)
    assert {n: a.shape for n, a in back.items()} == {n: a.shape for n, a in mixed.items()}
    for name, array in mixed.items():
        assert np.array_equal(back[name], array)


def test_nothing_is_padded_where_tied_layers_are_equally_wide() -> None:
    plan, arrays = plan_of("Chars"), arrays_of("Chars")
    padded = pad_ties(arrays, plan, widths_of(plan, arrays))
    assert all(padded[name] is array for name, array in arrays.items())
