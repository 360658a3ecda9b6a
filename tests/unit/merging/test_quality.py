"""Warnings, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedmerge.merging import Agreement, Position, Quality


def quality(merged: Agreement, **changes: Any) -> Quality:
    clients = {"a": Agreement(0.8, 0.5, 0.6), "b": Agreement(0.9, 0.6, 0.4)}
    return Quality(
        source=changes.get("source", "data"),
        samples=changes.get("samples", 200),
        merged=merged,
        clients=clients,
        candidates={"only": merged},
        chosen="only",
        outliers=changes.get("outliers", ()),
        dropped=changes.get("dropped", ()),
        alike=changes.get("alike", 0.8),
    )


def test_a_merge_without_finite_outputs_is_called_useless() -> None:
    (said,) = quality(Agreement(0.0, float("-inf"), float("inf"))).warnings()
    assert said == "the merge is useless: its outputs on data probes are not finite"


def test_outliers_and_dropped_clients_are_named() -> None:
    good = Agreement(0.95, 0.9, 0.2)
    (odd,) = quality(good, outliers=("a",)).warnings()
    (gone,) = quality(good, dropped=("c",)).warnings()
    assert odd.startswith("client a answers unlike the others")
    assert odd.endswith("leave it out with `drop_outliers`")
    assert gone == "client c was left out: it answers unlike the others"


@pytest.mark.parametrize(
    ("source", "distance", "is_told"),
    [
        ("data", 0.5, True),  # farther than b
        ("data", 0.37, True),  # hardly nearer
        ("data", 0.31, False),
        ("synthetic and noise", 0.31, True),  # enough of a lead on real inputs alone
        ("synthetic and noise", 0.25, False),
        ("generated text", 0.31, True),
    ],
)
def test_a_merge_that_is_not_clearly_nearer_to_the_ensemble_may_be_worse(
    source: str, distance: float, is_told: bool
) -> None:
    found = quality(Agreement(0.99, 0.9, distance), source=source)
    assert found.is_better is not is_told
    told = list(found.warnings())
    assert len(told) == is_told
    if is_told:
        how = "is predicted to be" if distance > 0.4 else "may be"
        assert told[0].startswith(
            f"the merge {how} worse than client b: on 200 {source} probes it is "
        )
        assert told[0].endswith("made-up probes flatter a merge") is (source != "data")


def test_a_client_that_nothing_is_nearer_than_is_told_to_be_the_result() -> None:
    found = replace(quality(Agreement(0.9, 0.6, 0.4)), chosen="client b")
    assert found.is_client
    assert not found.is_better
    (said,) = found.warnings()
    assert said.startswith("the result is client b itself: nothing that was tried comes nearer")
    assert found.verdict.endswith("so the result is that client.")
    assert not replace(found, chosen="only").is_client


def test_copies_of_one_client_are_no_reason_to_warn() -> None:
    same = Agreement(1.0, 1.0, 0.0)
    for source in ("data", "noise"):
        found = replace(quality(same, source=source), clients={"a": same, "b": same})
        assert list(found.warnings()) == []


@pytest.mark.parametrize(
    ("alike", "source", "is_told"),
    [(0.3, "data", True), (0.3, "noise", False), (0.6, "data", False), (None, "data", False)],
)
def test_clients_that_rarely_decide_alike_have_a_doubtful_ensemble(
    alike: float | None, source: str, is_told: bool
) -> None:
    found = list(quality(Agreement(0.99, 0.9, 0.2), alike=alike, source=source).warnings())
    assert len(found) == is_told
    if is_told:
        assert "two clients decide alike on only 30.0 % of the probes" in found[0]


@pytest.mark.parametrize(
    ("distance", "pull", "words"),
    [
        (0.0, 1.0, "100 % of the way from client b to the ensemble"),
        (0.2, 0.5, "50 % of the way from client b to the ensemble"),
        (0.4, 0.0, "as far from the ensemble as client b"),
        (0.6, -0.5, "farther from the ensemble than client b"),
        (float("inf"), None, "nowhere near the ensemble: its outputs are not finite"),
    ],
)
def test_pull_is_the_way_from_the_nearest_client_to_the_ensemble(
    distance: float, pull: float | None, words: str
) -> None:
    found = Position(distance, {"a": 0.6, "b": 0.4})
    assert found.pull == (None if pull is None else pytest.approx(pull))
    assert found.words == words


def test_a_client_that_is_the_ensemble_leaves_no_way_to_go() -> None:
    found = Position(0.1, {"a": 0.6, "b": 0.0})
    assert (found.pull, found.words) == (None, "the ensemble is as client b")


@pytest.mark.parametrize(
    ("distance", "likeness", "copied"),
    [
        (0.39, 0.99, "b"),
        (0.39, 0.98, None),  # it decides otherwise too often
        (0.30, 0.99, None),  # it is nearer to the ensemble
        (0.50, 0.99, "b"),
    ],
)
def test_a_merge_that_decides_as_one_client_and_is_no_nearer_is_that_client(
    distance: float, likeness: float, copied: str | None
) -> None:
    found = Position(distance, {"a": 0.6, "b": 0.4}, {"a": 0.5, "b": likeness})
    assert found.copied_client == copied
    told = "this is client b: nothing of the others is in it"
    assert (found.words == told) is (copied is not None)
