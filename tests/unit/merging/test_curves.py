"""Widths for a budget: spent where units match worst, never beyond it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from fedmerge.merging import Selection, allocate, loss_curve, select_all
from fedmerge.probes import normalised
from fedmerge.values import Group, Pinned, Plan, Product, TensorPlan, Units

CURVES = {
    "alike": {4: 0.02, 6: 0.01, 8: 0.0},
    "unlike": {4: 0.9, 6: 0.4, 8: 0.0},
}


def size(widths: Mapping[str, int]) -> int:
    return 10 * widths["alike"] + 10 * widths["unlike"]


def loss(widths: Mapping[str, int]) -> float:
    return sum(
        float(np.interp(widths[g], sorted(c), [c[w] for w in sorted(c)])) for g, c in CURVES.items()
    )


def test_the_group_that_matches_worst_gets_the_budget() -> None:
    assert allocate(CURVES, [], size, 100) == {"alike": 4, "unlike": 6}
    assert allocate(CURVES, [], size, 120) == {"alike": 4, "unlike": 8}


@pytest.mark.parametrize("budget", range(80, 165, 5))
def test_no_other_widths_within_the_budget_lose_less(budget: int) -> None:
    found = allocate(CURVES, [], size, budget)
    assert size(found) <= budget
    others = (dict(zip(CURVES, w, strict=True)) for w in itertools.product(range(4, 9), repeat=2))
    best = min(loss(widths) for widths in others if size(widths) <= budget)
    assert loss(found) <= best + 0.011  # greedy: at most one step of the flat curve behind


def test_without_a_budget_nothing_is_lost_and_at_the_least_nothing_grows() -> None:
    assert loss(allocate(CURVES, [], size, None)) == 0
    assert allocate(CURVES, [], size, 80) == {"alike": 4, "unlike": 4}


def test_tied_groups_widen_together() -> None:
    tied = allocate(CURVES, [("alike", "unlike")], size, 130)
    assert tied["alike"] == tied["unlike"] == 6


def test_a_curve_is_what_a_selection_loses_from_the_widest_client_on() -> None:
    selection = Selection(np.arange(6), np.array([9.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.0]))
    assert loss_curve(selection, 3) == {3: 2.0, 4: 1.0, 5: 0.5, 6: 0.0}
    assert loss_curve(selection, 6) == {6: 0.0}


def test_units_inside_others_and_those_without_responses_are_not_selected() -> None:
    rng = np.random.default_rng(0)
    clients = [
        {group: normalised(rng.normal(size=(2, 50)).astype(np.float32)) for group in groups}
        for groups in (("outer", "inner", "known"), ("outer", "inner"))
    ]
    layout = Product((Units("outer"), Units("inner", "outer")))
    plan = Plan(
        groups=(Group("outer"), Group("inner"), Group("known")),
        tensors={"w": TensorPlan((layout, Pinned(3)))},
    )
    assert set(select_all(plan, clients, [{}, {}])) == {"outer"}
