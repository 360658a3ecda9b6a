"""Whether groups can grow is tried where it counts, and said to be unknown elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from fedmerge.api import frontier, match, open_session, plan
from fedmerge.architecture import ModelCode, model_code
from fedmerge.architecture.from_code import WHY_UNTRIED
from fedmerge.merging import MatchOptions
from fedmerge.probes import ProbeOptions
from tests.unit.merging.test_fit import code, fresh

NOTHING = ProbeOptions("none")


def states(name: str = "mlp") -> list[dict[str, Any]]:
    return [dict(fresh(name, seed).state_dict()) for seed in (1, 2)]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets a number whenever growth is probed."""
    calls: list[int] = []
    probe = vars(model_code)["probe_growth"]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return probe(*args, **kwargs)

    monkeypatch.setattr(model_code, "probe_growth", counted)
    return calls


def test_a_merge_that_does_not_grow_tries_no_growth_and_says_so(tried: list[int]) -> None:
    merge = match(states(), MatchOptions(max_growth=1), model=code("mlp"), probes=NOTHING)
    assert tried == []
    assert {(g.can_grow, g.why) for g in merge.plan.groups} == {(False, WHY_UNTRIED)}
    recorded = merge.record({})["plan"]["groups"]
    assert {group["why"] for group in recorded} == {WHY_UNTRIED}


def test_the_merge_is_the_same_where_it_was_tried(tried: list[int]) -> None:
    options = MatchOptions(max_growth=1)
    fixed = match(states(), options, model=code("mlp"), probes=NOTHING)
    known = plan(states(), model=code("mlp"))
    free = match(states(), options, model=code("mlp"), plan=known, probes=NOTHING)
    assert tried == [1]
    assert any(group.can_grow for group in free.plan.groups)
    assert fixed.widths == free.widths
    for name in fixed.plan.tensors:
        assert (fixed.read(name) == free.read(name)).all()


@pytest.mark.parametrize("growth", [None, 1.5, "none"])
def test_a_merge_that_may_grow_tries_it(tried: list[int], growth: Any) -> None:
    merge = match(states(), MatchOptions(max_growth=growth), model=code("mlp"), probes=NOTHING)
    assert tried == [1]
    assert all(group.can_grow for group in merge.plan.groups)


def test_clients_of_different_widths_need_it_too(tried: list[int]) -> None:
    wide = match(states(), MatchOptions(max_growth=1.5), model=code("mlp"), probes=NOTHING)
    clients = [states()[0], wide.state_dict()]
    session = open_session(clients, MatchOptions(max_growth=1), model=code("mlp"))
    assert len(tried) == 2
    assert all(group.can_grow for group in session.plan.groups)


def test_a_plan_and_a_frontier_always_try_it(tried: list[int]) -> None:
    planned = plan(states(), MatchOptions(max_growth=1), model=code("mlp"))
    assert all(group.can_grow for group in planned.groups)
    probes = ProbeOptions("noise", count=20)
    found = frontier(states(), MatchOptions(max_growth=1), model=code("mlp"), probes=probes)
    assert tried == [1, 1]
    assert max(point.growth for point in found.merges) > 1.2


def test_what_an_earlier_merge_did_not_try_is_tried_when_it_counts(tried: list[int]) -> None:
    first = match(states(), MatchOptions(max_growth=1), model=code("mlp"), probes=NOTHING)
    net: ModelCode = code("mlp")
    again = match(
        states(), MatchOptions(max_growth=1.5), model=net, plan=first.plan, probes=NOTHING
    )
    assert tried == [1]
    assert all(group.can_grow for group in again.plan.groups)
    assert again.growth > 1
