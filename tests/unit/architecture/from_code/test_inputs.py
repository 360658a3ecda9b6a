"""Inputs deduced from a model's first layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedmerge.architecture.from_code import deduce_inputs
from fedmerge.errors import ArchitectureError
from tests.model_zoo_recurrent import Language, Packed


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(7, 3)), (2, 7)),
        (nn.LSTM(5, 6, batch_first=True), (2, 32, 5)),
        (nn.GRU(5, 6), (32, 2, 5)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), (2, 3, 28, 28)),
        (nn.Sequential(nn.Conv2d(3, 4, 5), nn.Flatten(), nn.Linear(3136, 2)), (2, 3, 32, 32)),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1)), (2, 2, 28)),
        (nn.Sequential(nn.ConvTranspose2d(9, 4, 4)), (2, 9, 1, 1)),
    ],
    ids=["linear", "lstm", "gru", "conv", "conv with flatten", "conv 1d", "generator"],
)  # fmt: skip
def test_the_first_layer_tells_the_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    (inputs,) = deduce_inputs(model)
    assert inputs.shape == shape
    assert inputs.dtype == torch.float32


def test_tokens_are_drawn_below_the_size_of_the_embedding() -> None:
    (tokens,) = deduce_inputs(Language(tied=False))
    assert tokens.shape == (2, 16)
    assert tokens.dtype == torch.long
    assert int(tokens.max()) < 11


def test_a_given_shape_is_taken_as_it_is() -> None:
    (inputs,) = deduce_inputs(Packed(), shape=(2, 4, 5))
    assert inputs.shape == (2, 4, 5)
    (tokens,) = deduce_inputs(Language(tied=True), shape=(1, 3), dtype=torch.long)
    assert tokens.dtype == torch.long


def test_a_model_that_runs_at_no_size_asks_for_it() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(17, 2))
    with pytest.raises(ArchitectureError, match="2×3×28×28, 2×3×32×32") as caught:
        deduce_inputs(net)
    assert "`input_shape`" in caught.value.hint


def test_a_model_without_a_known_layer_asks_for_a_shape() -> None:
    with pytest.raises(ArchitectureError, match="no layer that tells"):
        deduce_inputs(nn.Identity())
