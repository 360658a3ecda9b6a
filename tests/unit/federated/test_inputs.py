"""Class counts for the last layer, or why there are none."""

from __future__ import annotations

import pytest

from fedmerge.federated import ShardEntry, output_class_counts


def entry(client: str, counts: tuple[int, ...] | None) -> ShardEntry:
    return ShardEntry(client, "0" * 64, 9, counts)


def test_classes_that_a_client_never_saw_count_nothing() -> None:
    entries = [entry("a", (1, 2)), entry("b", (0, 0, 4))]
    assert output_class_counts(entries, {4}) == {"a": [1, 2, 0, 0], "b": [0, 0, 4, 0]}


@pytest.mark.parametrize(
    ("counts", "outputs", "why"),
    [
        ((1, 2), set(), "its outputs are made by no tensor of their own, but by tied weights"),
        ((1, 2), {2, 3}, "there are outputs of several sizes"),
        (None, {2}, "clients tell no class counts; if there are classes, give `class_counts`"),
        ((1, 2), {1}, "a has 2 classes, but there are 1 outputs; give `class_counts`"),
    ],
)
def test_why_there_are_no_class_counts_is_said(
    counts: tuple[int, ...] | None, outputs: set[int], why: str
) -> None:
    assert output_class_counts([entry("a", counts)], outputs) == why


def test_a_client_that_did_not_answer_counts_as_the_mean_of_the_others() -> None:
    entries = [entry("a", (1, 2)), ShardEntry("b"), entry("c", (2, 0, 3))]
    counts = output_class_counts(entries, {3})
    assert counts == {"a": [1, 2, 0], "b": [1.5, 1, 1.5], "c": [2, 0, 3]}
