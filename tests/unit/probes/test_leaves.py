"""Dead leaves: images with edges, standardised, by their seed alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedmerge.probes import Leaves, dead_leaves

SHAPE = (30, 3, 24, 20)


def leaves(seed: int = 0, settings: Leaves | None = None) -> Tensor:
    return dead_leaves(SHAPE, settings or Leaves(), torch.Generator().manual_seed(seed))


def test_leaves_have_mean_zero_and_variance_one() -> None:
    image = leaves()
    assert image.shape == SHAPE
    assert float(image.mean()) == pytest.approx(0, abs=1e-5)
    assert float(image.std()) == pytest.approx(1, abs=1e-5)


def test_the_seed_decides() -> None:
    assert torch.equal(leaves(), leaves())
    assert not torch.equal(leaves(), leaves(seed=1))


def test_neighbours_are_alike_but_for_edges() -> None:
    """Differences of neighbours are mostly tiny and sometimes large: white noise's are neither."""

    def tails(image: Tensor) -> float:
        steps = image.diff(dim=-1)
        return float(steps.pow(4).mean() / steps.pow(2).mean() ** 2)

    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    assert float(leaves().diff(dim=-1).abs().median()) < 0.2
    assert float(noise.diff(dim=-1).abs().median()) > 0.5
    assert tails(leaves()) > 6 > tails(noise)


def test_channels_share_what_they_are_told_to_share() -> None:
    def correlation(shared: float) -> float:
        image = leaves(settings=replace(Leaves(), shared=shared, shading=0.0))
        return float(torch.corrcoef(image.transpose(0, 1).flatten(1))[0, 1])

    assert correlation(1.0) == pytest.approx(1, abs=1e-5)
    assert abs(correlation(0.0)) < 0.3
    assert 0.4 < correlation(0.7) < 0.95
