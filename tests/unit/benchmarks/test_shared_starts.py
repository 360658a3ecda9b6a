"""The benchmark of clients that share their initial weights."""

from __future__ import annotations

from benchmarks.digits import FIRST_SEED
from benchmarks.shared_starts import ALPHAS, _told, scores


def test_clients_that_hardly_moved_merge_to_their_average() -> None:
    found = scores("perceptron", ALPHAS[1], steps=5, seed=FIRST_SEED)
    assert found.average == found.weights == found.code


def test_clients_that_drifted_apart_gain_by_the_match() -> None:
    found = scores("perceptron", ALPHAS[0], steps=60, seed=FIRST_SEED)
    assert found.weights > found.average + 5
    assert found.code > found.average + 5


def test_gains_are_told_with_their_signs() -> None:
    assert _told([-1.0, 0.0, 4.0, 3.0]) == ["+1.5", "-1.0", "1, 2"]
