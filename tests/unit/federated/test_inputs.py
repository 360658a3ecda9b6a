"""Class counts for the last layer, or why there are none; models tried on data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedmerge
from fedmerge.errors import TrainingError
from fedmerge.federated import (
    ShardEntry,
    Trial,
    open_start,
    output_class_counts,
    prepare_trial,
)
from fedmerge.training import Shard
from tests.unit.federated.nets import code, samples, save_clients, state_of


def entry(client: str, counts: tuple[int, ...] | None) -> ShardEntry:
    return ShardEntry(client, f"{client}.npz", 9, counts, "0")


def test_classes_that_a_client_never_saw_count_nothing() -> None:
    entries = [entry("a", (1, 2)), entry("b", (0, 0, 4))]
    assert output_class_counts(entries, {4}) == {"a": [1, 2, 0, 0], "b": [0, 0, 4, 0]}


@pytest.mark.parametrize(
    ("counts", "outputs", "why"),
    [
        ((1, 2), set(), "its outputs are made by no tensor of their own, but by tied weights"),
        ((1, 2), {2, 3}, "there are outputs of several sizes"),
        (None, {2}, "the task counts no classes; if there are any, give `class_counts`"),
        ((1, 2), {1}, "a has 2 classes, but there are 1 outputs; give `class_counts`"),
    ],
)
def test_why_there_are_no_class_counts_is_said(
    counts: tuple[int, ...] | None, outputs: set[int], why: str
) -> None:
    assert output_class_counts([entry("a", counts)], outputs) == why


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    clients = save_clients(tmp_path, {name: state_of("Residual", k) for k, name in enumerate("ab")})
    start = open_start(clients, [], code("Residual"), fedmerge.RetrainOptions())
    return prepare_trial(code("Residual"), start.clients[0], "classification", seed=0, device="cpu")


def test_a_trial_refuses_what_does_not_fit_and_draws_no_random_numbers(trial: Trial) -> None:
    found = samples("Residual", 1)
    before = torch.get_rng_state()
    for use in (trial.train_on, trial.evaluate_on):
        use(Shard("a", found["x"], found["y"], origin="a.npz"))
        with pytest.raises(TrainingError, match=r"a\.npz: y has the class 99, but the model has"):
            use(Shard("a", found["x"], found["y"] * 0 + 99, origin="a.npz"))
        with pytest.raises(TrainingError, match=r"a\.npz: the model fails on samples of shape"):
            use(Shard("a", found["x"].repeat(2, axis=1), found["y"], origin="a.npz"))
    assert torch.equal(torch.get_rng_state(), before)
