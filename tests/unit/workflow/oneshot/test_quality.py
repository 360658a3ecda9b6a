"""Outliers and warnings, from numbers alone."""

from __future__ import annotations

import pytest

from fedmerge.workflow.oneshot.agreement import Agreement
from fedmerge.workflow.oneshot.quality import Quality, outliers


def quality(merged: Agreement, **changes: tuple[str, ...]) -> Quality:
    clients = {"a": Agreement(0.8, 0.5), "b": Agreement(0.9, 0.6)}
    return Quality(
        source="noise",
        samples=200,
        merged=merged,
        clients=clients,
        candidates={"only": merged},
        chosen="only",
        outliers=changes.get("outliers", ()),
        dropped=changes.get("dropped", ()),
    )


@pytest.mark.parametrize(
    ("decisions", "explained", "is_warned"),
    [
        (0.95, 0.9, False),
        (0.95, 0.1, False),  # decisions count first
        (0.9, 0.6, False),
        (0.9, 0.595, False),  # nobody would notice
        (0.9, 0.5, True),
        (0.85, 0.99, True),
        (0.0, float("-inf"), True),
    ],
)
def test_a_merge_below_its_best_client_is_warned_of(
    decisions: float, explained: float, is_warned: bool
) -> None:
    found = list(quality(Agreement(decisions, explained)).warnings())
    assert len(found) == is_warned
    if is_warned:
        assert "worse than client b: on 200 noise probes" in found[0]
        assert f"{decisions:.1%}" in found[0]
        assert "b 90.0% and 60.0%" in found[0]


def test_outliers_and_dropped_clients_are_named() -> None:
    good = Agreement(0.95, 0.9)
    (odd,) = quality(good, outliers=("a",)).warnings()
    (gone,) = quality(good, dropped=("c",)).warnings()
    assert odd.startswith("client a answers unlike the others")
    assert odd.endswith("leave it out with --drop-outliers")
    assert gone == "client c was left out: it answers unlike the others"


def table(good: float, odd: float, clients: int) -> list[list[float]]:
    """Return agreements of each client with the others, the last one odd."""
    rows = [[good] * (clients - 2) + [odd] for _ in range(clients - 1)]
    return [*rows, [odd] * (clients - 1)]


@pytest.mark.parametrize("clients", [3, 4, 8])
def test_the_client_that_agrees_with_nobody_is_an_outlier(clients: int) -> None:
    assert outliers(table(0.8, 0.1, clients), 100) == [clients - 1]
    assert outliers(table(0.8, 0.7, clients), 100) == []
    assert outliers(table(0.3, 0.3, clients), 100) == []  # nobody agrees: nobody is odd


def test_of_two_clients_nobody_can_be_told() -> None:
    assert outliers([[0.0], [0.0]], 100) == []


def test_a_few_samples_prove_nothing() -> None:
    assert outliers(table(0.8, 0.3, 4), 1000) == [3]
    assert outliers(table(0.8, 0.3, 4), 10) == []
