"""Widths from shapes where only a sum or a product of groups shows."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fedmerge.architecture import keep_tensors, plan_from_json, solve_widths
from fedmerge.architecture.from_code import WHY_UNSOLVED, fix_widths, let_go
from fedmerge.errors import ArchitectureError
from fedmerge.values import Plan, TensorInfo

HEADS = {"prod": ["h", "d"]}
SHAPES = {"in": (6, 4), "out": (3, 6)}
WIDTHS = {"h": 2, "d": 3}


def attention(*groups: Any) -> Plan:
    return plan_from_json({"groups": [*groups], "tensors": {"in": [HEADS, 4], "out": [3, HEADS]}})


def test_a_product_of_two_groups_needs_the_width_of_one() -> None:
    for given in ({"name": "h", "width": 2}, {"name": "d", "width": 3}):
        plan = attention(*(given if given["name"] == g else g for g in ("h", "d")))
        assert solve_widths(plan, SHAPES, source="a") == WIDTHS
    with pytest.raises(ArchitectureError, match="does not fix the width of group 'h'"):
        solve_widths(attention("h", "d"), SHAPES, source="a")


def test_a_client_of_other_width_has_more_units_or_more_heads_as_the_plan_says() -> None:
    wider = {"in": (12, 4), "out": (3, 12)}
    by_heads = attention({"name": "h", "width": 2}, "d")
    by_units = attention("h", {"name": "d", "width": 3})
    assert solve_widths(by_heads, wider, source="a") == {"h": 2, "d": 6}
    assert solve_widths(by_units, wider, source="a") == {"h": 4, "d": 3}


def test_a_size_that_no_width_gives_is_refused_with_the_tensor_and_its_layout() -> None:
    plan = attention({"name": "h", "width": 2}, "d")
    with pytest.raises(
        ArchitectureError, match="b: 'in' has size 7 along axis 0, which is no h's 2 units × d's"
    ):
        solve_widths(plan, {"in": (7, 4), "out": (3, 7)}, source="b")


def test_another_tensor_may_show_the_number_of_heads() -> None:
    plan = plan_from_json({"tensors": {"in": [HEADS, 4], "scale": ["h"]}})
    assert solve_widths(plan, {"in": (6, 4), "scale": (2,)}, source="a") == WIDTHS
    assert fix_widths(plan, WIDTHS) == plan


def test_a_group_that_can_t_grow_is_held_else_the_inner_one() -> None:
    heads_fixed = attention({"name": "h", "can_grow": False, "why": "scale"}, "d")
    held = fix_widths(heads_fixed, WIDTHS)
    assert [(g.name, g.width, g.can_grow, g.why) for g in held.groups] == [
        ("h", 2, False, "scale"),
        ("d", None, True, ""),
    ]
    free = fix_widths(attention("h", "d"), WIDTHS)
    assert [(g.width, g.can_grow, g.why) for g in free.groups] == [
        (None, True, ""),
        (3, False, WHY_UNSOLVED),
    ]
    assert let_go(free) == attention("h", "d")
    assert let_go(held) == heads_fixed


def test_of_a_sum_equal_groups_are_tied_and_of_unequal_ones_the_narrower_is_held() -> None:
    plan = plan_from_json({"tensors": {"in": [{"cat": ["a", "b"]}, 4]}})
    tied = fix_widths(plan, {"a": 3, "b": 3})
    assert tied.same_width == (("a", "b"),)
    assert solve_widths(tied, {"in": (6, 4)}, source="a") == {"a": 3, "b": 3}
    held = fix_widths(plan, {"a": 2, "b": 4})
    assert held.same_width == ()
    assert [group.width for group in held.groups] == [2, None]
    assert solve_widths(held, {"in": (6, 4)}, source="a") == {"a": 2, "b": 4}


def test_a_kept_tensor_as_long_as_all_heads_pins_heads_and_units() -> None:
    plan = attention({"name": "h", "width": 2}, "d")
    kept = keep_tensors(plan, ["odd"], tensors={"odd": TensorInfo((6,), "float32")}, widths=WIDTHS)
    assert kept.groups == ()
    other = keep_tensors(plan, ["odd"], tensors={"odd": TensorInfo((5,), "float32")}, widths=WIDTHS)
    assert other.groups == plan.groups


def test_widths_that_follow_from_one_another_backwards_are_found_in_one_go() -> None:
    """Sweeps over all axes, one per group, would take minutes."""
    count = 10_000
    sums = {f"t{k}": [{"cat": [f"g{k}", f"g{k + 1}"]}] for k in range(count)}
    plan = plan_from_json({"tensors": {**sums, "last": [f"g{count}"]}})
    shapes = {**dict.fromkeys(sums, (5,)), "last": (2,)}
    started = time.process_time()
    widths = solve_widths(plan, shapes, source="a")
    assert time.process_time() - started < 10
    assert [widths[f"g{count - k}"] for k in range(4)] == [2, 3, 2, 3]
    with pytest.raises(ArchitectureError, match="'t9999' has size 1 along axis 0, which is no"):
        solve_widths(plan, {**shapes, "t9999": (1,)}, source="a")
