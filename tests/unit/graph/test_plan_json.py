"""The JSON form of plans: round trips, short hand-written forms, clear refusals."""

import json
from typing import Any

import pytest

from fedmerge.errors import ArchitectureError
from fedmerge.graph import ChainOptions, plan_chain, plan_from_json, plan_to_json
from fedmerge.types.layouts import Concat, Pinned, Product, Units
from fedmerge.types.plans import Group
from tests.unit.graph.test_chain import infos, shapes_of
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


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "must be a JSON object, not list"),
        ({"tensors": {"w": "h"}}, "'w' must be a JSON object, not str"),
        ({"tensors": {"w": [{"sum": ["h"]}]}}, "'w' has the layout"),
        ({"tensors": {"w": [True]}}, "'w' has the layout True"),
        ({"tensors": {"w": ["h"]}, "grups": []}, "unknown entry 'grups'"),
        ({"tensors": {"w": ["h"]}, "groups": ["x"]}, "group 'x' stands on no tensor's axis"),
        ({"tensors": {"w": ["h"]}, "groups": ["h", "h"]}, "listed twice"),
        ({"tensors": {"w": ["h"]}, "groups": [{"name": "h", "width": 0}]}, "'h' has the width 0"),
        ({"tensors": {"w": ["h"]}, "groups": [{"name": "h", "width": 2.5}]}, "the width 2.5"),
        (
            {"tensors": {"w": ["h"]}, "groups": [{"name": "h", "width": 2, "can_grow": True}]},
            "'h' has a width of its own, so it can't grow",
        ),
        ({"tensors": {"w": {"axes": ["h"], "out": 1}}}, "out axis 1, expected 0 to 0"),
        ({"tensors": {"w": {"axes": ["h"], "role": "x"}}}, "role 'x'"),
        ({"tensors": {"w": [{"prod": ["h", "h"]}]}}, "group 'h' in more than one factor"),
        ({"tensors": {"w": ["h"]}, "same_width": [["h", "z"]]}, "unknown group 'z'"),
        ({"tensors": {"w": ["h"]}, "norms": [{"producer": "q"}]}, "'producer' is 'q'"),
        ({"tensors": {"w": ["h"]}, "format": 9}, "format 9, expected 1"),
    ],
)
def test_a_wrong_plan_is_refused_with_what_is_wrong(value: Any, problem: str) -> None:
    with pytest.raises(ArchitectureError, match=problem):
        plan_from_json(value)
