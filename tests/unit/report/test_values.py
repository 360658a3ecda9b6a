"""From a record's JSON to what a page tells, by numbers counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedmerge.merging import (
    GroupEntry,
    MatchOptions,
    MergeRecord,
    SourceEntry,
    group_entry,
    rounded,
)
from fedmerge.report import (
    APART,
    AVERAGED,
    UNRECORDED,
    Edge,
    Score,
    Scores,
    frontier_points,
    group_views,
    last_metrics,
    plan_picture,
    predicted_scores,
    rounds_view,
    run_scores,
    verdict,
)
from fedmerge.values import OUTPUT, Group, Pinned, Plan, TensorPlan, Units

PLAN = Plan(
    groups=(Group("h"), Group("r", can_grow=False, why="a norm")),
    tensors={
        "fc1.weight": TensorPlan((Units("h"), Pinned(4))),
        "fc1.bias": TensorPlan((Units("h"),)),
        "rnn.in": TensorPlan((Units("r"), Units("h"))),
        "rnn.again": TensorPlan((Units("r"), Units("r")), role="recurrent"),
        "scale": TensorPlan((Units("r"),), role="pointwise"),
        "fc2.weight": TensorPlan((Pinned(3, OUTPUT), Units("r"))),
        "skip.weight": TensorPlan((Units("h"), Units("r"))),
    },
)
ENTRY = GroupEntry(
    "h", (2, 2), 3, 0, 0.5, 0.1, threshold=0.5, similarities=((0.9, None), (0.7, None))
)
RECORD = MergeRecord(
    options=MatchOptions(),
    sources=(SourceEntry("a", "a.pt", "0", 1), SourceEntry("b", "b.pt", "1", 1)),
    plan=PLAN,
    groups=(ENTRY,),
    parameters=10,
    growth=1.5,
    assignments={"a": {"h": np.array([0, 1])}, "b": {"h": np.array([0, 2])}},
    tensors={},
    is_trained=False,
    fitted=frozenset(),
)


def test_edges_lead_from_the_input_through_groups_to_the_output() -> None:
    picture = plan_picture(PLAN, {"h": [2, 2], "r": [5, 6]}, {"h": 3, "r": 6})
    assert picture.edges == (
        Edge(-1, 0, ("fc1.weight",)),
        Edge(0, 1, ("rnn.in",)),
        Edge(1, 1, ("rnn.again",)),
        Edge(1, 2, ("fc2.weight",)),
        Edge(1, 0, ("skip.weight",)),
    )
    assert [(s.client_widths, s.width, s.why_fixed) for s in picture.stages] == [
        ((2, 2), 3, ""),
        ((5, 6), 6, "a norm"),
    ]


def test_a_tied_embedding_leads_to_the_output_by_the_group_that_it_makes() -> None:
    tied = {
        "tokens": TensorPlan((Pinned(9, "tokens"), Units("h")), out=1),
        "up": TensorPlan((Units("r"), Units("h"))),
        "down": TensorPlan((Units("h"), Units("r"))),
    }
    picture = plan_picture(replace(PLAN, tensors=tied), {"h": [2, 2], "r": [5, 6]})
    assert Edge(0, 2, ("tokens",)) in picture.edges
    own = {**tied, "head": TensorPlan((Pinned(9, OUTPUT), Units("r")))}
    picture = plan_picture(replace(PLAN, tensors=own), {"h": [2, 2], "r": [5, 6]})
    assert [edge for edge in picture.edges if edge.end == 2] == [Edge(1, 2, ("head",))]


def test_groups_count_owners_and_rank_matches() -> None:
    (view,) = group_views(RECORD)
    assert view.owners == (2, 1)
    assert view.similarities == (0.9, 0.7)
    (match,) = view.matches
    assert (match.unit, match.owners) == (0, (("a", 0), ("b", 0)))
    assert match.similarity == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("changes", "method", "expected"),
    [
        ({"match_rate": 0.0}, "fedma", APART),
        ({"scatter": None}, "average", AVERAGED),
        ({}, "fedma", UNRECORDED),
    ],
)
def test_a_group_says_why_costs_are_not_known(
    changes: dict[str, Any], method: Any, expected: str
) -> None:
    entry = replace(ENTRY, similarities=(), **changes)
    record = replace(RECORD, groups=(entry,), options=MatchOptions(method=method))
    (view,) = group_views(record)
    assert view.unknown == expected
    assert view.matches == ()


def test_entries_survive_json_and_old_ones_have_no_costs() -> None:
    assert group_entry(ENTRY.to_json()) == ENTRY
    old = ENTRY.summary()
    assert set(old) == {"name", "client_widths", "width", "padding", "match_rate", "scatter"}
    assert group_entry(old).similarities == ()


def test_cosines_are_recorded_with_four_digits() -> None:
    assert rounded([np.array([0.123456, np.nan])]) == ((0.1235, None),)


def round_entry(number: int, **changes: Any) -> dict[str, Any]:
    plain = {
        "number": number,
        "pass_number": 1,
        "layer": f"layer {number}",
        "stage": "whole",
        "losses": {"a": 1.0, "b": 3.0},
        "metrics": None,
        "widths": {"h": number},
        "bytes_up": 1_000_000,
        "bytes_down": 500_000,
        "missing": {},
    }
    return {**plain, **changes}


def run_record(*rounds: dict[str, Any]) -> dict[str, Any]:
    retrained = {"options": {"method": "fedma"}, "rounds": list(rounds)}
    return {"retrain": retrained, "groups": [{"name": "h"}], "sources": [{}, {}]}


def test_rounds_add_up_bytes_and_keep_what_is_not_known() -> None:
    own = run_record(
        round_entry(1, missing={"b": "timeout"}, losses={}),
        round_entry(2, metrics={"accuracy": 0.5, "loss": None}),
    )
    view = rounds_view(own, {"other": run_record(round_entry(1))})
    first, other = view.curves
    assert first.megabytes == (1.5, 3.0)
    assert first.losses == (None, 2.0)
    assert first.metrics == {"accuracy": (None, 0.5), "loss": (None, None)}
    assert last_metrics(first) == {"accuracy": 0.5}
    assert (first.is_own, other.is_own, other.name) == (True, False, "other")
    assert [(m.round, m.client, m.why) for m in view.missing] == [(1, "b", "it took too long")]
    assert view.widths == {"h": (1, 2)}


QUALITY: dict[str, Any] = {
    "probes": "noise",
    "samples": 200,
    "agreement": {"decisions": 0.9, "explained": 0.8, "distance": 0.1},
    "clients": {
        "a": {"decisions": 0.5, "explained": None, "distance": None},
        "b": {"decisions": 0.6, "explained": 0.2, "distance": 0.4},
    },
    "candidates": {
        "element-wise average": {"decisions": 0.3, "explained": 0.1, "distance": 0.8},
        "equal clients, mean": {"decisions": 0.9, "explained": 0.8, "distance": 0.1},
        "b leads, fit": {"decisions": 0.7, "explained": 0.4, "distance": 0.3},
    },
    "chosen": "equal clients, mean",
}


def test_predicted_scores_have_clients_rivals_and_the_merge_once() -> None:
    scores = predicted_scores(QUALITY)
    assert [(row.kind, row.model, row.value) for row in scores.rows] == [
        ("client", "a", 0.5),
        ("client", "b", 0.6),
        ("average", "element-wise average", 0.3),
        ("other", "tried: b leads, fit", 0.7),
        ("merge", "the merge", 0.9),
    ]
    pulls = [row.details for row in scores.rows]
    assert pulls == [("",), ("0.00",), ("-1.00",), ("0.25",), ("0.75",)]


def test_records_without_distances_have_no_pull() -> None:
    older = {"decisions": 0.9, "explained": 0.8}
    scores = predicted_scores({**QUALITY, "clients": {"a": older}, "agreement": older})
    assert [row.details for row in scores.rows if row.kind in ("client", "merge")] == [("",)] * 2


def test_the_verdict_names_all_that_the_merge_has_to_beat() -> None:
    found = verdict(predicted_scores(QUALITY), "It decides in", "it has 10 parameters")
    assert found == (
        "It decides in 90.0 %, against 60.0 % of the best client (b), 50.0 % of the worst (a) and "
        "30.0 % of the element-wise average; it has 10 parameters."
    )


def test_the_best_client_by_loss_has_the_lowest() -> None:
    rows = (Score("client", "a", 2.0), Score("client", "b", 1.0), Score("merge", "m", 1.5))
    scores = Scores("t", "loss", False, (), rows, "")
    assert "1.0000 of the best client (b)" in verdict(scores, "The loss is", "small")


def test_a_verdict_without_numbers_says_why() -> None:
    assert verdict(None, "nobody ran it", "small") == (
        "How good this model is, is not known: nobody ran it; small."
    )


def test_baselines_stand_beside_the_run() -> None:
    scores = run_scores({"fedma": {"loss": 1.0, "accuracy": 0.9}, "fedavg": {"accuracy": 0.8}})
    assert scores is not None
    assert (scores.metric, scores.is_share) == ("accuracy", True)
    found = verdict(scores, "It reaches", "small")
    assert found == "It reaches 90.0 %, against 80.0 % of fedavg; small."
    assert run_scores({"fedma": {}}) is None


def test_a_frontier_ends_with_the_ensemble() -> None:
    def point(name: str, budget: float | None, decisions: float | None) -> dict[str, Any]:
        agreement = {"decisions": decisions, "explained": 0.0}
        size = {"growth": 1.0, "parameters": 10}
        return {"name": name, "budget": budget, **size, "agreement": agreement}

    value = {
        "clients": [point("a", None, 0.5)],
        "points": [point("mean", 1.0, 0.7), point("ensemble", None, 1.0)],
    }
    found = frontier_points(value)
    assert [p.kind for p in found] == ["client", "merge", "ensemble"]
    assert found[1].name == "merge within 1 × (mean)"
    assert not any(point.is_own for point in found)
    own = frontier_points(value, found[1].parameters)
    assert [point.is_own for point in own] == [False, True, False]
