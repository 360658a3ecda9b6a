"""How alike answers are, whatever a model returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError
from fedmerge.merging import (
    Agreement,
    Averaging,
    agreement,
    are_class_scores,
    ensemble_weights,
    mean_outputs,
    outputs_on,
    probabilities,
)
from fedmerge.probes import Probes

RETURNED: dict[str, tuple[Callable[[Tensor], Any], tuple[int, int]]] = {
    "logits": (lambda x: x, (300, 4)),
    "a tuple": (lambda x: (x, x.sum()), (300, 4)),
    "a dictionary": (lambda x: {"logits": x, "more": x[:, :1]}, (300, 4)),
    "whole numbers first": (lambda x: (x.argmax(1), x), (300, 4)),
    "one number per sample": (lambda x: x[:, 0], (300, 1)),
    "sequences": (lambda x: x[:, None].expand(-1, 5, -1), (1500, 4)),
    "images of classes": (lambda x: x[:, :, None, None].expand(-1, -1, 2, 3), (1800, 4)),
}


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize("name", list(RETURNED))
def test_answers_are_rows_of_outputs(name: str) -> None:
    make, shape = RETURNED[name]
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    found = outputs_on(Returns(make), Probes((x,), "noise"), device="cpu")
    assert found.shape == shape
    repeats = shape[0] // 300
    assert torch.equal(found[::repeats], x[:, : shape[1]])


def test_a_model_without_numbers_can_not_be_compared() -> None:
    model = Returns(lambda x: x.argmax(1))
    with pytest.raises(ArchitectureError, match="returns no numbers"):
        outputs_on(model, Probes((torch.randn(4, 3),), "noise"), device="cpu")


def test_agreement_counts_equal_decisions_and_explained_variance() -> None:
    wanted = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    assert agreement(wanted, wanted) == Agreement(1.0, 1.0, 0.0)
    turned = wanted.clone()
    turned[0] = wanted[1]
    found = agreement(turned, wanted)
    variance = float((wanted - wanted.mean(0)).square().mean())
    assert found.decisions == 0.75
    assert found.explained == pytest.approx(1 - 2 / 8 / variance)
    assert agreement(wanted.mean(0).expand(4, 2), wanted).explained == pytest.approx(0)


def test_one_output_decides_by_its_sign() -> None:
    wanted = torch.tensor([[1.0], [-1.0], [2.0], [-2.0]])
    assert agreement(0.1 * wanted, wanted).decisions == 1
    assert agreement(wanted.abs(), wanted).decisions == 0.5


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_what_is_not_finite_agrees_with_nothing(spoilt: float) -> None:
    wanted = torch.randn(5, 3)
    outputs = wanted.clone()
    outputs[2, 1] = spoilt
    found = agreement(outputs, wanted)
    assert found.decisions == 0
    assert found.to_json() == {"decisions": 0.0, "explained": None, "distance": None}
    assert found.rank < agreement(torch.zeros(5, 3), wanted).rank


def test_distances_are_those_of_probabilities_where_outputs_score_classes() -> None:
    one, two = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3)]])
    assert agreement(one, two).distance == pytest.approx(0.5)  # |1/2 - 1/4| + |1/2 - 3/4|
    assert agreement(one, two, are_classes=False).distance == pytest.approx(math.log(3))
    assert agreement(one + 7, two).distance == pytest.approx(0.5)  # an offset changes no softmax


def test_probabilities_are_taken_as_they_are() -> None:
    given = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert probabilities(given) is given
    assert torch.equal(probabilities(2 * given), (2 * given).softmax(1))


def test_scores_of_classes_are_neither_single_numbers_nor_the_sample_itself() -> None:
    samples, tokens = torch.zeros(6, 4), torch.zeros(6, 10, dtype=torch.int64)
    assert are_class_scores(torch.zeros(6, 10), [samples])
    assert not are_class_scores(torch.zeros(6, 1), [samples])
    assert not are_class_scores(torch.zeros(6, 4), [samples])  # as an autoencoder gives
    assert are_class_scores(torch.zeros(6, 10), [tokens])


def test_the_ensemble_is_the_weighted_mean() -> None:
    one, two = torch.ones(2, 3), torch.full((2, 3), 5.0)
    assert torch.equal(mean_outputs([one, two], [3.0, 1.0]), torch.full((2, 3), 2.0))


def test_members_of_an_ensemble_count_by_their_share_of_each_class() -> None:
    shares = np.array([[1.0, 0.25, 0.0], [0.0, 0.75, 0.0], [0.0, 0.0, 1.0]])
    averaging = Averaging((1.0, 3.0, 1.0), class_weights=shares)
    every = torch.stack(ensemble_weights(averaging, [0, 1, 2], 3))
    assert torch.equal(every, torch.from_numpy(shares).float())
    without_last = torch.stack(ensemble_weights(averaging, [0, 1], 3))
    assert without_last.tolist() == [[1.0, 0.25, 1.0], [0.0, 0.75, 3.0]]  # nobody has class 2
    no_classes = torch.stack(ensemble_weights(averaging, [0, 1], 5))
    assert no_classes.tolist() == [[1.0] * 5, [3.0] * 5]
    one, two = torch.zeros(2, 3), torch.full((2, 3), 4.0)
    found = mean_outputs([one, two], ensemble_weights(averaging, [0, 1], 3))
    assert found.tolist() == [[0.0, 3.0, 3.0]] * 2
