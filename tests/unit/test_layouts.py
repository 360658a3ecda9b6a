"""The three functions on axis layouts, and their agreement with each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerge.values import (
    Assignment,
    Concat,
    Layout,
    Pinned,
    Plan,
    Product,
    TensorPlan,
    Units,
    axis_size,
    groups_in,
    index_map,
    inner_groups,
    outer_groups,
    plain_products,
    possible_outers,
    replace_groups,
    terms,
    unit_positions,
    with_inside,
)

GATES = Product((Pinned(4), Units("h")))
FLAT = Product((Units("c"), Pinned(3)))
BOTH = Concat((Units("f"), Units("b")))
HEADS = Product((Units("h"), Units("d")))


@pytest.mark.parametrize(
    ("layout", "widths", "size"),
    [
        (Units("h"), {"h": 5}, 5),
        (Pinned(7), {}, 7),
        (GATES, {"h": 5}, 20),
        (FLAT, {"c": 2}, 6),
        (BOTH, {"f": 2, "b": 3}, 5),
        (HEADS, {"h": 2, "d": 3}, 6),
        (Product((BOTH, Pinned(2))), {"f": 2, "b": 3}, 10),
    ],
)
def test_size_follows_the_widths(layout: Layout, widths: dict[str, int], size: int) -> None:
    assert axis_size(layout, widths) == size


def test_gates_keep_their_order_when_hidden_units_move() -> None:
    moved = index_map(GATES, {"h": np.array([2, 0])}, {"h": 3})
    assert moved.tolist() == [2, 0, 5, 3, 8, 6, 11, 9]


def test_flattened_channels_move_with_all_their_pixels() -> None:
    moved = index_map(FLAT, {"c": np.array([1, 0])}, {"c": 2})
    assert moved.tolist() == [3, 4, 5, 0, 1, 2]


def test_a_concatenation_shifts_by_the_new_widths() -> None:
    targets = {"f": np.array([1, 0]), "b": np.array([0])}
    assert index_map(BOTH, targets, {"f": 4, "b": 2}).tolist() == [1, 0, 4]


def test_positions_of_a_hidden_unit_are_its_rows_in_every_gate() -> None:
    assert unit_positions(GATES, "h", {"h": 3})[1].tolist() == [1, 4, 7, 10]


def test_positions_of_a_unit_behind_a_concatenation() -> None:
    assert unit_positions(BOTH, "b", {"f": 2, "b": 3}).tolist() == [[2], [3], [4]]


def test_a_group_that_is_not_there_has_no_positions() -> None:
    assert unit_positions(FLAT, "h", {"c": 2, "h": 3}).shape == (3, 0)


def test_positions_of_a_head_and_of_a_unit_in_all_heads() -> None:
    layout = Concat((HEADS, Pinned(1)))
    widths = {"h": 2, "d": 3}
    assert unit_positions(layout, "h", widths).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert unit_positions(layout, "d", widths).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_heads_and_their_units_move_at_once_and_leave_room_for_new_ones() -> None:
    targets = {"h": np.array([2, 0]), "d": np.array([1, 0])}
    assert index_map(HEADS, targets, {"h": 3, "d": 2}).tolist() == [5, 4, 1, 0]
    assert index_map(HEADS, targets, {"h": 3, "d": 4}).tolist() == [9, 8, 1, 0]


OWN = Product((Units("h"), Units("d", "h")))


def test_units_inside_heads_move_in_the_order_of_their_own_head() -> None:
    targets = {"h": np.array([2, 0]), "d": np.array([[1, 0], [0, 1]])}
    assert index_map(OWN, targets, {"h": 3, "d": 2}).tolist() == [5, 4, 0, 1]
    assert index_map(OWN, targets, {"h": 3, "d": 4}).tolist() == [9, 8, 0, 1]
    alike = {**targets, "d": np.array([1, 0])}
    assert index_map(OWN, alike, {"h": 3, "d": 2}).tolist() == [5, 4, 1, 0]
    stacked = Product((Units("h"), Concat((Units("d", "h"), Pinned(1), Units("d", "h")))))
    assert index_map(stacked, targets, {"h": 3, "d": 2}).tolist() == [
        11,
        10,
        12,
        14,
        13,
        0,
        1,
        2,
        3,
        4,
    ]


def test_two_groups_inside_one_move_by_its_units_each() -> None:
    layout = Product((Units("k"), Units("q", "k"), Units("v", "k")))
    orders = np.array([[1, 0], [0, 1]])
    targets = {"k": np.array([1, 0]), "q": orders, "v": orders[::-1]}
    widths = {"k": 2, "q": 2, "v": 2}
    assert index_map(layout, targets, widths).tolist() == [6, 7, 4, 5, 1, 0, 3, 2]
    nested = Product((Product((Units("k"), Units("q", "k"))), Units("v", "k")))
    assert index_map(nested, targets, widths).tolist() == [6, 7, 4, 5, 1, 0, 3, 2]


def test_a_unit_inside_a_head_has_positions_of_its_own() -> None:
    layout = Concat((OWN, Pinned(1), OWN))
    widths = {"h": 2, "d": 3}
    expected = [[unit, unit + 7] for unit in range(6)]
    assert unit_positions(layout, "d", widths).tolist() == expected
    assert unit_positions(layout, "h", widths)[1].tolist() == [3, 4, 5, 10, 11, 12]
    assert inner_groups(layout) == {"d": "h"}


def test_units_inside_what_is_pinned_or_renamed_follow_it() -> None:
    assert replace_groups(OWN, lambda g: Pinned(2) if g == "h" else Units(g)) == Product(
        (Pinned(2), Units("d"))
    )
    assert replace_groups(OWN, lambda g: Units(g.upper())) == Product((Units("H"), Units("D", "H")))


def test_assignments_inside_others_are_numbered_over_all_of_them() -> None:
    outer = Assignment(np.array([2, 0]), 3)
    inner = Assignment(np.array([[1, 0], [0, 1]]), 4)
    assert inner.numbers(outer).tolist() == [9, 8, 0, 1]
    assert inner.units == 2
    assert Assignment(np.array([1, 0]), 4).numbers(outer).tolist() == [1, 0]
    with pytest.raises(AssertionError, match="not injective"):
        Assignment(np.array([[1, 0], [1, 1]]), 4)


def plan_of(*layouts: Layout) -> Plan:
    return Plan((), {f"w{k}": TensorPlan((layout,)) for k, layout in enumerate(layouts)})


def test_a_group_may_be_inside_those_that_stand_before_it_everywhere() -> None:
    both = Product((Units("k"), Units("q"), Units("d")))
    found = possible_outers(plan_of(both, Product((Units("k"), Units("d")))))
    assert found == {"k": (), "q": ("k",), "d": ("k",)}
    assert possible_outers(plan_of(both, Units("d")))["d"] == ()
    assert possible_outers(plan_of(both, Product((Units("d"), Units("k")))))["d"] == ()
    placed = with_inside(plan_of(both), {"d": "k"})
    assert placed.inside == {"d": "k"}
    assert with_inside(placed, {}) == plan_of(both)


def test_a_product_with_a_concatenation_is_a_sum_of_plain_products() -> None:
    stacked = Product((Units("h"), Concat((Units("d"), Units("v")))))
    first, second = terms(stacked, {"h": 2, "d": 2, "v": 1})
    assert (first.factors, second.factors) == (
        (Units("h"), Units("d")),
        (Units("h"), Units("v")),
    )
    assert first.positions.tolist() == [[0, 1], [3, 4]]
    assert second.positions.tolist() == [[2], [5]]
    assert [*plain_products(stacked)] == [first.factors, second.factors]
    assert set(outer_groups(stacked)) == {"h"}
    assert not set(outer_groups(FLAT))


def test_replacing_groups_reaches_every_leaf() -> None:
    replaced = replace_groups(
        Product((BOTH, Pinned(2))), lambda g: Pinned(3) if g == "f" else Units(g)
    )
    assert replaced == Product((Concat((Pinned(3), Units("b"))), Pinned(2)))
    assert list(groups_in(replaced)) == ["b"]


def layouts() -> st.SearchStrategy[Layout]:
    heads = Product((Units("a"), Units("b")))
    named: list[Layout] = [Units("a"), Units("b"), heads, Product((heads, Pinned(2)))]
    leaves: st.SearchStrategy[Layout] = st.one_of(
        st.sampled_from(named),
        st.integers(1, 3).map(lambda n: Pinned(n)),
    )
    return st.recursive(
        leaves,
        lambda children: st.one_of(
            st.tuples(st.integers(1, 3).map(Pinned), children).map(Product),
            st.tuples(children, st.integers(1, 3).map(Pinned)).map(Product),
            st.lists(children, min_size=1, max_size=3).map(lambda parts: Concat(tuple(parts))),
        ),
        max_leaves=5,
    )


@given(layouts(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99))
def test_every_position_of_a_unit_moves_to_the_positions_of_its_target(
    layout: Layout, a: int, b: int, growth: int, seed: int
) -> None:
    old, new = {"a": a, "b": b}, {"a": a + growth, "b": b + growth}
    rng = np.random.default_rng(seed)
    targets = {g: rng.permutation(new[g])[:width] for g, width in old.items()}
    moved = index_map(layout, targets, new)
    assert len(moved) == axis_size(layout, old)
    assert len(set(moved.tolist())) == len(moved)
    assert moved.size == 0 or moved.max() < axis_size(layout, new)
    for group in old:
        before = unit_positions(layout, group, old)
        after = unit_positions(layout, group, new)
        for positions, target in zip(moved[before], targets[group], strict=True):
            assert set(positions) <= set(after[target])  # the rest is room for other groups' units
            assert growth or len(positions) == len(after[target])
