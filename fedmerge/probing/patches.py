"""The parts of an image that the outputs of a convolution read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Window:
    """How a convolution's kernel moves, one number per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


def patches(image: Tensor, window: Window, rows: Tensor) -> Tensor:
    """Return (rows, channels × kernel positions) of an image (samples, channels, …).

    `rows` are places of outputs, samples first; columns are in the order of a flattened kernel.
    """
    sides = [(pad, pad) for pad in reversed(window.padding)]
    padded = functional.pad(image, list(itertools.chain(*sides)))
    sizes = [
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, dilation in zip(
            padded.shape[2:], window.kernel, window.stride, window.dilation, strict=True
        )
    ]
    parts = []
    for offset in itertools.product(*map(range, window.kernel)):
        cut = [slice(None), slice(None)]
        for place, stride, dilation, count in zip(
            offset, window.stride, window.dilation, sizes, strict=True
        ):
            start = place * dilation
            cut.append(slice(start, start + stride * (count - 1) + 1, stride))
        pixels = padded[tuple(cut)].movedim(1, -1).reshape(-1, image.shape[1])
        parts.append(pixels[rows])
    return torch.stack(parts, dim=2).flatten(1)
