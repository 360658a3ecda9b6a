"""Features of units that hold other units: attention heads, and what is inside them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from fedmerge.matching import SKETCH, TieBreaker, gather_units
from fedmerge.merging import Averaging, average_tensor
from fedmerge.values import (
    Array,
    Assignment,
    Concat,
    Group,
    Pinned,
    Plan,
    Product,
    TensorPlan,
    Units,
)
from tests.unit.matching.test_units import OUT, ArrayClient, placed

STACKED = Concat((Product((Units("h"), Units("d"))),) * 2 + (Product((Units("h"), Units("v"))),))
HEADS = Plan(
    groups=(Group("h"), Group("d"), Group("v")),
    tensors={
        "qkv": TensorPlan((STACKED, Pinned(6))),
        "qkv.b": TensorPlan((STACKED,)),
        "out": TensorPlan((OUT, Product((Units("h"), Units("v"))))),
    },
)
HEAD_WIDTHS = {"h": 3, "d": 4, "v": 2}


def heads_client(seed: int = 0, inputs: int = 6) -> ArrayClient:
    """Return an attention layer: 3 heads of 4 queries, 4 keys and 2 values."""
    rng = np.random.default_rng(seed)
    shapes = {"qkv": (30, inputs), "qkv.b": (30,), "out": (2, 6)}
    return ArrayClient({name: rng.normal(size=shape) for name, shape in shapes.items()})


def turned_inside(one: ArrayClient, seed: int, *, is_rotated: bool = False) -> ArrayClient:
    """Return the layer with every head's units in an order of their own, or rotated."""
    rng = np.random.default_rng(seed)
    arrays = {name: array.copy() for name, array in one.arrays.items()}
    for head in range(3):
        for size, starts in ((4, (0, 12)), (2, (24,))):
            turn = np.eye(size)[rng.permutation(size)]
            if is_rotated:
                turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
            for start in starts:
                rows = slice(start + head * size, start + (head + 1) * size)
                arrays["qkv"][rows] = turn @ arrays["qkv"][rows]
                arrays["qkv.b"][rows] = turn @ arrays["qkv.b"][rows]
        columns = slice(2 * head, 2 * head + 2)
        arrays["out"][:, columns] = arrays["out"][:, columns] @ turn.T
    return ArrayClient(arrays)


def head_features(
    one: ArrayClient,
    *,
    outgoing: bool = False,
    plan: Plan = HEADS,
    placements: Mapping[str, Assignment] | None = None,
) -> Array:
    return gather_units(
        one,
        plan,
        "h",
        widths=HEAD_WIDTHS,
        placed=placements or {},
        ties=TieBreaker(),
        outgoing=outgoing,
    ).weights


@pytest.mark.parametrize("outgoing", [False, True])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_features_of_a_head_do_not_depend_on_the_order_of_units_inside_it(
    outgoing: bool, is_rotated: bool
) -> None:
    one = heads_client()
    other = turned_inside(one, 1, is_rotated=is_rotated)
    assert not np.allclose(one.arrays["qkv"], other.arrays["qkv"])
    own, turned = (head_features(c, outgoing=outgoing) for c in (one, other))
    np.testing.assert_allclose(own, turned, atol=1e-7)
    placements = {"d": placed(4, 2, 0, 1, 3), "v": placed(2, 1, 0)}
    np.testing.assert_array_equal(own, head_features(one, outgoing=outgoing, placements=placements))


def test_a_unit_moved_to_another_head_changes_the_features_of_both() -> None:
    one = heads_client()
    arrays = dict(one.arrays)
    arrays["qkv"] = arrays["qkv"][[4, 1, 2, 3, 0, *range(5, 30)]]
    changed = np.abs(head_features(one) - head_features(ArrayClient(arrays))).max(axis=1)
    assert (changed[:2] > 0.01).all()
    assert changed[2] < 1e-12


def test_features_of_a_head_are_the_roots_of_its_weights_squares() -> None:
    one = heads_client()
    weights = np.column_stack([one.arrays["qkv"], one.arrays["qkv.b"]])
    queries, keys, values = np.split(weights, [12, 24])
    units = gather_units(one, HEADS, "h", widths=HEAD_WIDTHS, placed={}, ties=TieBreaker())
    assert units.entries == 30 * 7
    np.testing.assert_allclose(np.sum(units.weights**2), np.sum(weights**2))
    for head in range(3):
        q, k, v = (x.reshape(3, -1, 7)[head] for x in (queries, keys, values))
        # weights of queries and keys, then their biases: in the order of the tensors
        pairs = np.column_stack([q[:, :6], k[:, :6], q[:, 6], k[:, 6]])
        first, second = np.split(units.weights[head], [14 * 14])
        for root, block in ((first.reshape(14, 14), pairs), (second.reshape(7, 7), v)):
            np.testing.assert_allclose(root, root.T, atol=1e-12)
            np.testing.assert_allclose(root @ root, block.T @ block, atol=1e-9)
            assert np.linalg.eigvalsh(root).min() > -1e-9


def test_of_many_inputs_random_sums_are_compared_that_keep_lengths_and_heads() -> None:
    inputs = 2 * SKETCH
    wide = Plan(HEADS.groups, {"qkv": TensorPlan((STACKED, Pinned(inputs)))})
    one = heads_client(inputs=inputs)
    own = head_features(one, plan=wide)
    assert own.shape == (3, 2 * SKETCH**2)
    total = np.sum(one.arrays["qkv"] ** 2)
    assert np.sum(own**2) == pytest.approx(total, rel=0.1)
    other = turned_inside(one, 1)
    noise = np.random.default_rng(2).normal(size=(30, inputs))
    noisy = ArrayClient({**other.arrays, "qkv": other.arrays["qkv"] + noise})
    found = head_features(noisy, plan=wide)
    distances = np.sum((own[:, None] - found[None]) ** 2, axis=2)
    assert distances.argmin(axis=1).tolist() == [0, 1, 2]


def test_units_inside_heads_are_compared_head_by_head_once_heads_are_placed() -> None:
    one = heads_client()
    units = gather_units(
        one, HEADS, "v", widths=HEAD_WIDTHS, placed={"h": placed(4, 2, 0, 3)}, ties=TieBreaker()
    )
    values = one.arrays["qkv"][24:].reshape(3, 2, 6)
    for unit in range(2):
        expected = np.zeros((4, 6))
        expected[[2, 0, 3]] = values[:, unit]
        np.testing.assert_array_equal(units.weights[unit, :24], expected.ravel())
    assert units.entries == 6 * 7


def test_units_inside_heads_that_are_not_placed_do_not_depend_on_the_heads_order() -> None:
    one = heads_client()
    order = np.array([2, 0, 1])
    arrays = {
        name: np.concatenate(
            [x.reshape(3, -1, *x.shape[1:])[order].reshape(x.shape) for x in parts]
        )
        for name in ("qkv", "qkv.b")
        for parts in [np.split(one.arrays[name], [12, 24])]
    }
    other = ArrayClient({**one.arrays, **arrays})
    own, moved = (
        gather_units(c, HEADS, "d", widths=HEAD_WIDTHS, placed={}, ties=TieBreaker()).weights
        for c in (one, other)
    )
    np.testing.assert_allclose(own, moved, atol=1e-7)


def test_heads_that_are_not_finite_have_features_that_are_not() -> None:
    one = heads_client()
    arrays = {name: array.copy() for name, array in one.arrays.items()}
    arrays["qkv"][5, 2] = np.nan
    broken = head_features(ArrayClient(arrays))
    assert np.isnan(broken).any()
    assert broken.shape == head_features(one).shape


def test_a_position_belongs_to_those_that_own_its_head_and_its_unit() -> None:
    plan = Plan(
        groups=(Group("h"), Group("d")),
        tensors={"w": TensorPlan((Product((Units("h"), Units("d"))), Pinned(1)))},
    )
    one, two = (ArrayClient({"w": np.full((4, 1), value)}) for value in (1.0, 3.0))
    placements = [
        {"h": placed(3, 0, 1), "d": placed(3, 0, 1)},
        {"h": placed(3, 2, 1), "d": placed(3, 2, 1)},
    ]
    merged = average_tensor(
        "w",
        [one, two],
        plan,
        placements=placements,
        widths={"h": 3, "d": 3},
        averaging=Averaging((1.0, 1.0)),
    )
    np.testing.assert_allclose(merged.reshape(3, 3), [[1, 1, 0], [1, 2, 3], [0, 3, 3]])
