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
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), (2, 3, 32, 32)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), (2, 1, 28, 28)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(2704, 2)), (2, 3, 28, 28)),
        (nn.Sequential(nn.Conv2d(3, 4, 5), nn.Flatten(), nn.Linear(3136, 2)), (2, 3, 32, 32)),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1)), (2, 2, 28)),
        (nn.Sequential(nn.ConvTranspose2d(9, 4, 4)), (2, 9, 1, 1)),
    ],
    ids=[
        *("linear", "lstm", "gru", "conv", "conv of one colour", "conv with flatten"),
        *("conv with flatten, larger", "conv 1d", "generator"),
    ],
)  # fmt: skip
def test_the_first_layer_tells_the_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    (inputs,) = deduce_inputs(model)
    assert inputs.shape == shape
    assert inputs.dtype == torch.float32


def reducing(strides: int) -> nn.Module:
    """Return a net with global pooling whose convolutions halve the image so many times."""
    halves = [nn.Conv2d(4, 4, 3, 2, 1) for _ in range(strides - 1)]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), *halves, *pooled)


@pytest.mark.parametrize(("halvings", "side"), [(1, 32), (2, 32), (3, 64), (4, 128), (5, 224)])
def test_a_net_that_takes_any_size_gets_one_that_suits_its_strides(
    halvings: int, side: int
) -> None:
    (inputs,) = deduce_inputs(reducing(halvings))
    assert inputs.shape == (2, 3, side, side)


class NotTooLarge(nn.Module):
    """A net that reduces images by 32 and refuses those of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = reducing(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] > 100:
            raise ValueError("too large")
        found: torch.Tensor = self.net(x)
        return found


def test_a_net_that_does_not_run_at_that_size_gets_the_smallest() -> None:
    (inputs,) = deduce_inputs(NotTooLarge())
    assert inputs.shape == (2, 3, 28, 28)


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
