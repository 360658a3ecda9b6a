"""Patches against torch's own unfolding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fedmerge.probes import Window, patches

WINDOWS = [
    Window((3, 3), (1, 1), (0, 0), (1, 1)),
    Window((3, 2), (2, 1), (1, 0), (1, 2)),
    Window((1, 1), (2, 3), (0, 0), (1, 1)),
    Window((2, 4), (1, 2), (2, 1), (2, 1)),
]


@pytest.mark.parametrize("window", WINDOWS)
def test_patches_are_what_torch_unfolds(window: Window) -> None:
    image = torch.randn(3, 2, 8, 9, generator=torch.Generator().manual_seed(0))
    unfolded = functional.unfold(
        image, window.kernel, dilation=window.dilation, padding=window.padding, stride=window.stride
    )
    expected = unfolded.transpose(1, 2).flatten(0, 1)
    assert torch.equal(patches(image, window, torch.arange(len(expected))), expected)


def test_some_rows_are_the_same_rows() -> None:
    image = torch.randn(3, 2, 8, 9, generator=torch.Generator().manual_seed(0))
    everything = patches(image, WINDOWS[1], torch.arange(3 * 4 * 7))
    rows = torch.tensor([40, 3, 3, 71])
    assert torch.equal(patches(image, WINDOWS[1], rows), everything[rows])
    assert not torch.equal(patches(image, WINDOWS[1], rows), everything[rows.flip(0)])
