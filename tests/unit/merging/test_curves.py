"""Widths for a budget: spent where units match worst, never beyond it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import pytest

from fedmerge.api import open_session
from fedmerge.matching import GroupMatching
from fedmerge.merging import MatchOptions, allocate, loss_curve, unexplained, unit_products
from fedmerge.values import Assignment
from tests.unit.merging.test_fit import code, fresh

FloatArray: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"

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


def matching(*assigned: list[int]) -> GroupMatching:
    width = 1 + max(max(own) for own in assigned)
    return GroupMatching(
        assignments=tuple(Assignment(np.array(own), width) for own in assigned),
        width=width,
        sweeps=1,
        scatter=0.0,
    )


def test_copies_lose_nothing_and_opposites_everything() -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(size=(3, 200)).astype(np.float32)
    two = one[[2, 0, 1]]
    assert unexplained(unit_products([one, two]), matching([0, 1, 2], [2, 0, 1])) < 1e-4
    opposite = unexplained(
        unit_products([one, -one]), matching([0, 1, 2], [0, 1, 2])
    )  # they cancel out
    assert opposite == pytest.approx(1, abs=1e-3)


def test_units_that_stay_apart_lose_nothing_and_strangers_merged_lose_half() -> None:
    rng = np.random.default_rng(0)
    one, two = (rng.normal(size=(3, 2000)).astype(np.float32) for _ in range(2))
    assert unexplained(unit_products([one, two]), matching([0, 1, 2], [3, 4, 5])) < 1e-4
    lost = unexplained(unit_products([one, two]), matching([0, 1, 2], [0, 1, 2]))
    assert lost == pytest.approx(0.5, abs=0.05)


def direct(responses: list[FloatArray], found: GroupMatching) -> float:
    """Return what `unexplained` does, from the responses themselves."""
    every = np.concatenate(responses).astype(np.float64)
    merged = np.zeros((found.width, every.shape[1]))
    for own, assignment in zip(responses, found.assignments, strict=True):
        merged[assignment.indices] += own
    order = np.random.default_rng(0).permutation(every.shape[1])
    fitted, tried = np.split(order, [int(0.75 * len(order))])
    gram = merged[:, fitted] @ merged[:, fitted].T
    gram += 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram))
    guess = np.linalg.solve(gram, merged[:, fitted] @ every[:, fitted].T).T @ merged[:, tried]
    return float(np.square(every[:, tried] - guess).sum() / np.square(every[:, tried]).sum())


def test_products_tell_what_the_responses_would() -> None:
    rng = np.random.default_rng(1)
    mixed = rng.normal(size=(12, 5)).astype(np.float32)
    common = rng.normal(size=(5, 900)).astype(np.float32)
    noise = 0.3 * rng.normal(size=(12, 900)).astype(np.float32)
    one, two, three = np.split((mixed @ common + noise).astype(np.float32), 3)
    for found in (
        matching([0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]),
        matching([0, 1, 2, 3], [4, 2, 5, 0], [6, 1, 2, 5]),
    ):
        slow = direct([one, two, three], found)
        assert 0.05 < slow < 0.9
        fast = unexplained(unit_products([one, two, three]), found)
        assert fast == pytest.approx(slow, abs=1e-5)


def test_units_that_never_respond_and_copies_have_a_curve() -> None:
    clients = [dict(fresh("mlp", 1).state_dict()) for _ in range(2)]
    session = open_session(clients, MatchOptions(), model=code("mlp"))
    rng = np.random.default_rng(0)
    quiet = rng.normal(size=(session.widest[session.plan.groups[0].name], 500)).astype(np.float32)
    quiet[1:] = 0
    curve = loss_curve(session, [quiet, quiet], session.plan.groups[0].name)
    assert max(curve.values()) < 1e-4
