"""Dead leaves: images of many overlapping shapes, with edges as natural images have them.

Pink noise has natural images' spectrum but no edge; layers that are fitted to noise alone do badly
on images. Shapes of all sizes that hide one another give both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaves:
    """How many shapes there are, and what they look like; lengths are shares of the image's side.

    Half of the shapes are ellipses, half are boxes, turned at random and shaded along one axis.
    """

    count: int = 40
    smallest: float = 0.05
    largest: float = 0.7
    decay: float = 3.0  # sizes r have a density of r^-decay: as many pixels of each size
    stretch: float = 0.5  # deviation of the logarithm of length ÷ width
    shading: float = 0.5  # deviation of the change of colour across a shape
    shared: float = 0.7  # of the channels' variance: shapes are light or dark in all colours


def dead_leaves(shape: tuple[int, ...], leaves: Leaves, generator: torch.Generator) -> Tensor:
    """Return images (samples, channels, height, width) of mean 0 and variance 1 over all."""
    samples, channels, height, width = shape
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    image = _colour(samples, channels, leaves.shared, generator).expand(shape).clone()
    for _ in range(leaves.count):
        along, across, size = _coordinates(x, y, samples, leaves, generator)
        is_box = torch.rand((samples, 1, 1), generator=generator) < 0.5
        is_inside = torch.where(
            is_box,
            torch.maximum(along.abs(), across.abs()) < size,
            along.square() + across.square() < size.square(),
        )
        slope = leaves.shading * torch.randn((samples, 1, 1), generator=generator)
        shade = (slope * along / size)[:, None]
        colour = _colour(samples, channels, leaves.shared, generator) + shade
        image = torch.where(is_inside[:, None], colour, image)
    return (image - image.mean()) / image.std().clamp_min(1e-6)


def _colour(samples: int, channels: int, shared: float, generator: torch.Generator) -> Tensor:
    common = torch.randn((samples, 1, 1, 1), generator=generator)
    own = torch.randn((samples, channels, 1, 1), generator=generator)
    return math.sqrt(shared) * common + math.sqrt(1 - shared) * own


def _coordinates(
    x: Tensor, y: Tensor, samples: int, leaves: Leaves, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pixels' places (samples, height, width) in a random shape's axes, and its size."""

    def uniform() -> Tensor:
        return torch.rand((samples, 1, 1), generator=generator)

    power = 1 - leaves.decay
    low, high = leaves.smallest**power, leaves.largest**power
    size = (low + (high - low) * uniform()) ** (1 / power)
    dx, dy = (
        x - (1.2 * uniform() - 0.1),
        y - (1.2 * uniform() - 0.1),
    )  # centres a little outside too
    angle = math.pi * uniform()
    stretch = torch.exp(leaves.stretch * torch.randn((samples, 1, 1), generator=generator))
    along = (dx * torch.cos(angle) + dy * torch.sin(angle)) / stretch
    across = (dy * torch.cos(angle) - dx * torch.sin(angle)) * stretch
    return along, across, size
