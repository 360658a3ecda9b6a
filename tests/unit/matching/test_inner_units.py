"""Units inside others are matched in every one of these by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from fedmerge.matching import (
    GroupMatching,
    SearchOptions,
    TieBreaker,
    UnitFeatures,
    gather_units,
    keep_apart,
    match_inside,
    match_units,
    prior_at_threshold,
)
from fedmerge.values import (
    Array,
    Assignment,
    Group,
    IntArray,
    Pinned,
    Plan,
    Product,
    TensorPlan,
    Units,
)
from tests.unit.matching.test_units import ArrayClient

HEADS, UNITS, LENGTH = 3, 4, 20
MATCH = partial(
    match_units,
    prior=prior_at_threshold(0.5, 1.0, gamma=1.0),
    options=SearchOptions(),
    max_width=UNITS,
    rng=np.random.default_rng(0),
)


def rows(values: Array) -> UnitFeatures:
    """Return features of (heads, units, length)."""
    flat = values.reshape(-1, values.shape[-1])
    return UnitFeatures(flat, np.zeros((len(flat), 0)))


def nets(seed: int = 0) -> tuple[Array, Array, IntArray, IntArray]:
    """Return a net's heads, the same with heads and units in each in other orders, and these."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(HEADS, UNITS, LENGTH))
    heads = rng.permutation(HEADS)
    orders = np.stack([rng.permutation(UNITS) for _ in range(HEADS)])
    moved = np.empty_like(values)
    for head in range(HEADS):
        moved[heads[head], orders[head]] = values[head]
    return values, moved, heads, orders


def test_every_head_finds_the_order_of_its_own_units() -> None:
    values, moved, heads, orders = nets()
    outer = [Assignment(np.arange(HEADS), HEADS), Assignment(np.argsort(heads), HEADS)]
    found = match_inside([rows(values), rows(moved)], outer, MATCH)
    assert (found.width, found.match_rate) == (UNITS, 1.0)
    assert found.scatter < 1e-12
    one, other = (assignment.indices for assignment in found.assignments)
    for head in range(HEADS):
        np.testing.assert_array_equal(other[heads[head]][orders[head]], one[head])
    assert len({tuple(row) for row in other.tolist()}) > 1  # no order for all of them does
    assert all((cosines > 1 - 1e-6).all() for cosines in found.similarities)
    numbers = [set(own.tolist()) for own in found.numbers]
    assert numbers == [set(range(HEADS * UNITS))] * 2


def test_heads_of_one_client_keep_the_order_of_their_units() -> None:
    values, moved, *_ = nets()
    apart = keep_apart([HEADS, HEADS]).assignments
    found = match_inside([rows(values), rows(moved)], apart, MATCH)
    expected = np.tile(np.arange(UNITS), (HEADS, 1))
    for assignment in found.assignments:
        np.testing.assert_array_equal(assignment.indices, expected)
    assert (found.width, found.match_rate) == (UNITS, 0.0)
    assert all(np.isnan(cosines).all() for cosines in found.similarities)


def test_the_width_is_that_of_the_head_that_needs_most() -> None:
    values, moved, heads, _ = nets()
    moved[heads[1]] = np.random.default_rng(9).normal(size=(UNITS, LENGTH))  # another head
    outer = [Assignment(np.arange(HEADS), HEADS), Assignment(np.argsort(heads), HEADS)]
    free = partial(MATCH, max_width=None)
    found = match_inside([rows(values), rows(moved)], outer, free)
    assert UNITS < found.width <= 2 * UNITS
    assert found.assignments[1].indices[heads[0]].max() < UNITS
    limited = match_inside([rows(values), rows(moved)], outer, MATCH)
    assert limited.width == UNITS


def apart(units: Sequence[UnitFeatures]) -> GroupMatching:
    return keep_apart([own.count for own in units])


def test_kept_apart_the_units_of_a_shared_head_stand_side_by_side() -> None:
    values, moved, *_ = nets()
    outer = [Assignment(np.arange(HEADS), HEADS)] * 2
    found = match_inside([rows(values), rows(moved)], outer, apart)
    assert (found.width, found.match_rate) == (2 * UNITS, 0.0)


def test_features_of_units_inside_placed_groups_are_in_the_global_layout() -> None:
    layout = Product((Units("k"), Units("q", "k"), Units("v", "k")))
    plan = Plan(
        groups=(Group("k"), Group("q"), Group("v")),
        tensors={"w": TensorPlan((layout, Pinned(2)))},
    )
    values = np.random.default_rng(0).normal(size=(2 * 3 * 4, 2))
    client = ArrayClient({"w": values})
    orders = np.array([[1, 0, 2], [2, 1, 0]])
    placed = {"k": Assignment(np.array([1, 0]), 2), "q": Assignment(orders, 3)}
    widths = {"k": 2, "q": 3, "v": 4}
    found = gather_units(client, plan, "v", widths=widths, placed=placed, ties=TieBreaker())
    assert found.weights.shape == (2 * 4, 3 * 2)
    for k in range(2):
        expected = np.empty((3, 4, 2))
        expected[orders[k]] = values.reshape(2, 3, 4, 2)[k]
        np.testing.assert_array_equal(found.weights.reshape(2, 4, 3, 2)[k], expected.swapaxes(0, 1))
    alike = gather_units(client, plan, "q", widths=widths, placed={}, ties=None)
    assert len(alike.weights) == 2 * 3
