"""The JSON form of plans: round trips, short hand-written forms, clear refusals."""

import json
import re
from typing import Any

import pytest

from fedmerge.architecture import ChainOptions, plan_chain, plan_from_json, plan_to_json
from fedmerge.errors import ArchitectureError
from fedmerge.values import Concat, Group, Pinned, Product, Units
from tests.unit.architecture.test_chain import infos, shapes_of
from tests.zoo import ZOO


@pytest.mark.parametrize("name", [n for n in ZOO if "tied" not in n])
def test_every_zoo_plan_survives_json(name: str) -> None:
    plan = plan_chain(infos(shapes_of(ZOO[name].build())), ChainOptions(), aliases={}, source="a")
    text = json.dumps(plan_to_json(plan))
    assert plan_from_json(json.loads(text)) == plan
    changed = text.replace('"can_grow": false', '"can_grow": true').replace('"prod"', '"cat"')
    if changed != text:
        assert plan_from_json(json.loads(changed)) != plan


def test_a_hand_written_plan_needs_tensors_only() -> None:
    plan = plan_from_json(
        {
            "tensors": {
                "emb.weight": {"axes": [100, "e"], "out": 1},
                "fc.weight": ["h", {"cat": ["e", 3]}],
                "out.weight": [10, {"prod": ["h", 16]}],
            }
        }
    )
    assert [group.name for group in plan.groups] == ["e", "h"]
    assert plan.tensors["fc.weight"].axes[1] == Concat((Units("e"), Pinned(3)))
    assert plan.tensors["out.weight"].axes[1] == Product((Units("h"), Pinned(16)))
    assert plan.tensors["out.weight"].makes_outputs
    assert not plan.tensors["emb.weight"].makes_outputs


def test_a_group_with_a_width_of_its_own_can_t_grow() -> None:
    heads = {"w": [{"prod": ["h", "d"]}, 4]}
    plan = plan_from_json({"tensors": heads, "groups": [{"name": "h", "width": 2}, "d"]})
    assert plan.groups == (Group("h", False, "the plan gives its width", 2), Group("d"))
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
    assert plan != plan_from_json({"tensors": heads, "groups": ["h", "d"]})


def heads_plan(*groups: object, axis: object = None) -> dict[str, Any]:
    tensors = {"q": [{"prod": ["h", "d"]}, 4], "k": [axis or {"prod": ["h", "d"]}, 4]}
    return {"tensors": tensors, "groups": [{"name": "h", "width": 2}, *groups]}


def test_a_group_inside_another_one_is_so_on_all_of_its_axes() -> None:
    plan = plan_from_json(heads_plan({"name": "d", "inside": "h"}))
    assert plan.inside == {"d": "h"}
    assert plan.tensors["k"].axes[0] == Product((Units("h"), Units("d", "h")))
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
    before = plan_from_json(heads_plan("d"))  # as plans were without it
    assert before.inside == {}
    assert before != plan
    assert "inside" not in json.dumps(plan_to_json(before))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (heads_plan({"name": "d", "inside": "z"}), "'d' is not inside 'z' on all of its axes"),
        (heads_plan({"name": "d", "inside": "h"}, axis="d"), "'d' is not inside 'h' on all"),
        (
            heads_plan({"name": "d", "inside": "h"}, axis={"prod": ["d", "h"]}),
            "'d' is not inside 'h' on all of its axes",
        ),
        (heads_plan({"name": "d", "inside": 3}), "Expected `str | null`"),
        (
            {**heads_plan(), "groups": [{"name": "d", "inside": "h"}, "h"]},
            "'d' is inside 'h', which is listed after it",
        ),
        (
            {
                "tensors": {"w": [{"prod": ["a", "b", "c"]}]},
                "groups": ["a", {"name": "b", "inside": "a"}, {"name": "c", "inside": "b"}],
            },
            "'c' is inside 'b', which is inside another one itself",
        ),
    ],
)
def test_a_group_that_is_not_inside_another_one_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(ArchitectureError, match=re.escape(problem)):
        plan_from_json(value)


NORM = {"producer": "w", "mean": "w", "variance": "w"}


def nested(depth: int) -> Any:
    layout: Any = "h"
    for _ in range(depth):
        layout = {"cat": [layout]}
    return layout


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "the plan is wrong: Expected `object`, got `array`"),
        ({"tensors": {"w": "h"}}, "tensor 'w' is wrong: Expected `object | array`, got `str`"),
        ({"tensors": {"v": ["h"], "w": [{"sum": ["h"]}]}}, "tensor 'w' is wrong: .* field `sum`"),
        ({"tensors": {"w": [True]}}, "tensor 'w' is wrong: .* got `bool`"),
        ({"tensors": {"w": [-1]}}, "tensor 'w' is wrong: Expected `int` >= 0"),
        ({"tensors": {"w": [{"why": "x"}]}}, "tensor 'w' is wrong: expected {"),
        ({"tensors": {"w": [{"prod": ["h"], "cat": ["h"]}]}}, "tensor 'w' is wrong: expected {"),
        (
            {"tensors": {"w": [{"prod": []}]}},
            "tensor 'w' is wrong: Expected `array` of length >= 1",
        ),
        ({"tensors": {"w": ["h"]}, "grups": []}, "unknown field `grups`"),
        ({"tensors": {"w": ["h"]}, "groups": ["x"]}, "group 'x' stands on no tensor's axis"),
        ({"tensors": {"w": ["h"]}, "groups": ["h", "h"]}, "listed twice"),
        (
            {"tensors": {"w": ["h"]}, "groups": [{"name": "h", "width": 0}]},
            "Expected `int` >= 1 - at `\\$.groups",
        ),
        (
            {"tensors": {"w": ["h"]}, "groups": [{"name": "h", "width": 2.5}]},
            "Expected `int | null`, got `float`",
        ),
        (
            {"tensors": {"w": ["h"]}, "groups": [{"name": "h", "width": 2, "can_grow": True}]},
            "'h' has a width of its own, so it can't grow",
        ),
        ({"tensors": {"w": {"axes": ["h"], "out": 1}}}, "out axis 1, expected 0 to 0"),
        ({"tensors": {"w": {"axes": ["h"], "role": "x"}}}, "Invalid enum value 'x'"),
        ({"tensors": {"w": [{"prod": ["h", "h"]}]}}, "group 'h' in more than one factor"),
        ({"tensors": {"w": ["h"]}, "same_width": [["h", "z"]]}, "unknown group 'z'"),
        ({"tensors": {"w": ["h"]}, "norms": [NORM | {"producer": "q"}]}, "'producer' is 'q'"),
        ({"tensors": {"w": ["h", 3]}, "norms": [NORM]}, "'w' has not one number per unit of 'w'"),
        ({"tensors": {"w": []}, "norms": [NORM]}, "producer 'w' has no axes"),
        ({"tensors": {"w": ["h"]}, "same_width": [[]]}, "an empty list"),
        ({"tensors": {"w": ["h"]}, "same_width": [["h"], ["h"]]}, "a group twice"),
        ({"tensors": {"w": [{"prod": ["h", {"cat": [0, 0]}]}]}}, "a factor of size 0"),
        ({"tensors": {"w": [nested(100)]}}, "more than 64 levels deep"),
        ({"tensors": {"w": [nested(100_000)]}}, "more than 64 levels deep"),
        (
            {"tensors": {"w": [{"prod": [{"cat": [1] * 101}, {"cat": [1] * 100}]}]}},
            "10,000 products",
        ),
        ({"tensors": {"w": [{"prod": [{"cat": [1, 1]}] * 4000}]}}, "10,000 products"),
        ({"tensors": {"n" * 10**6: ["h"]}}, "tensor 'n{239}…' is wrong: Expected `str` of length"),
        ({"tensors": {"w": ["n" * 5000]}}, "tensor 'w' is wrong: Expected `str` of length <= 4096"),
        ({"tensors": {"w": ["h"]}, "format": 9}, "format 9, expected 1"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "plan",
)
def test_a_wrong_plan_is_refused_with_what_is_wrong(value: Any, problem: str) -> None:
    with pytest.raises(ArchitectureError, match=problem):
        plan_from_json(value)
