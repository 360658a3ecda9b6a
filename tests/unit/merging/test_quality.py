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


@pytest.mark.parametrize(
    ("decisions", "explained", "is_warned"),
    [
        (0.95, 0.9, False),
        (0.95, 0.1, False),  # decisions count first
        (0.9, 0.5, True),
        (0.85, 0.99, True),
    ],
)
def test_a_merge_below_its_best_client_is_warned_of(
    decisions: float, explained: float, is_warned: bool
) -> None:
    found = list(quality(Agreement(decisions, explained, 0.2)).warnings())
    assert len(found) == is_warned
    if is_warned:
        assert "predicted to be worse than client b: on 200 data probes" in found[0]
        assert f"{100 * decisions:.1f} %" in found[0]
        assert found[0].endswith("b in 90.0 %; 50 % of the way from client b to the ensemble")


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
    ("source", "decisions", "samples", "is_told"),
    [
        ("data", 0.9, 200, True),  # no better than b
        ("data", 0.92, 200, True),  # by chance: 0.1 - 0.08 < (0.18 / 200) ** 0.5
        ("data", 0.92, 20_000, False),
        ("data", 0.95, 200, False),
        ("synthetic and noise", 0.95, 200, True),  # half of b's disagreement, but on made-up inputs
        ("synthetic and noise", 0.95, 20_000, True),  # more of them don't help
        ("synthetic and noise", 0.98, 200, False),
        ("generated text", 0.95, 200, True),
    ],
)
def test_a_merge_that_is_not_clearly_better_may_be_worse(
    source: str, decisions: float, samples: int, is_told: bool
) -> None:
    found = list(quality(Agreement(decisions, 0.9, 0.2), source=source, samples=samples).warnings())
    assert len(found) == is_told
    if is_told:
        doubt = "so few probes can't tell" if source == "data" else "made-up probes flatter a merge"
        assert found[0].startswith(f"the merge may be worse than client b ({doubt}): on {samples}")


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
