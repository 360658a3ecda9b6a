"""Probes of noise: Gaussian, or dead leaves where inputs are images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from fedmerge.errors import UsageError
from fedmerge.probes.probe_inputs import IMAGE_AXES, Probes, picture_shape


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


MOST_COLOURS = 4  # more channels are no image's
BLOCK = 1 << 24  # numbers made at once (64 MB in float32), bounds memory


@dataclass(frozen=True)
class Spectrum:
    """How alike noise and natural images are: amplitudes fall with frequency as 1/f^exponent."""

    exponent: float = 1.0
    exponent_spread: float = 0.2  # samples draw theirs from exponent ± this
    contrast_spread: float = 0.3  # samples' logarithmic contrasts deviate by so much
    shared: float = 0.75  # of the channels' variance: edges show in all colours
    leafy: float = 0.5  # share of the images that are dead leaves
    texture: float = 0.3  # deviation of the pink noise on these


def noise_probes(
    like: tuple[Tensor, ...],
    count: int,
    *,
    mean: float | Sequence[float],
    std: float | Sequence[float],
    seed: int,
    tokens: int | None,
    spectrum: Spectrum | None = None,
) -> Probes:
    """Return noise inputs of the examples' dtypes and of their shapes (…, …) beyond axis 0.

    Floats (C, spatial…) and (H, W) or (steps, features) are pink noise over the spatial axes, half
    of the images of few channels have edges besides (`dead_leaves`), (F,) is white; all have the
    mean and deviation asked for (one number, or one per channel) in expectation. Integers are
    uniform below `tokens`; masks repeat the example's first.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for example in like:
        if not example.ndim:
            raise UsageError("noise is made per sample, but an input of the model is one number")
        shape = (count, *example.shape[1:])
        if example.dtype == torch.bool:
            made.append(example[:1].cpu().expand(shape).clone())
        elif example.is_floating_point():
            shift, scale = (_per_channel(mean, shape, "mean"), _per_channel(std, shape, "std"))
            unit = _unit_noise(picture_shape(shape) or shape, spectrum or Spectrum(), generator)
            made.append(unit.view(shape).mul_(scale).add_(shift).to(example.dtype))
        else:
            made.append(_tokens(shape, tokens, generator).to(example.dtype))
    return Probes(tuple(made), "noise")


def spatial_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the axes, from the end, along which neighbours in samples (n, …) are alike.

    >>> spatial_axes((8, 3, 32, 32)), spatial_axes((8, 28, 28)), spatial_axes((8, 784))
    ((-2, -1), (-2, -1), ())
    """
    own = len(shape) - 1
    return tuple(range(-max(2, own - 1), 0)) if own >= 2 else ()


def _unit_noise(shape: tuple[int, ...], spectrum: Spectrum, generator: torch.Generator) -> Tensor:
    """Return noise of mean 0 and variance 1 in expectation, made block by block."""
    noise = torch.empty(shape)
    axes = spatial_axes(shape)
    rows = max(1, BLOCK // max(1, noise[:1].numel()))
    for start in range(0, len(noise), rows):
        block = noise[start : start + rows].normal_(generator=generator)
        if axes:
            block.copy_(_pink(block, axes, spectrum, generator))
        if len(shape) == IMAGE_AXES and shape[1] <= MOST_COLOURS:
            _add_leaves(block, spectrum, generator)
    return noise


def _add_leaves(pink: Tensor, spectrum: Spectrum, generator: torch.Generator) -> None:
    """Turn some pink images (n, channels, height, width) into textured leaves, in place."""
    chosen = torch.rand(len(pink), generator=generator) < spectrum.leafy
    textured = pink[chosen]
    if len(textured):
        leaves = dead_leaves(tuple(textured.shape), Leaves(), generator)
        mixed = leaves + spectrum.texture * textured
        pink[chosen] = mixed / (1 + spectrum.texture**2) ** 0.5


def _pink(
    white: Tensor, axes: tuple[int, ...], spectrum: Spectrum, generator: torch.Generator
) -> Tensor:
    """Return white noise (n, …) with a 1/f spectrum, channels that agree and varied contrast."""
    if white.ndim - 1 > len(axes) and white.shape[1] > 1:
        common = torch.randn((len(white), 1, *white.shape[2:]), generator=generator)
        white = white * (1 - spectrum.shared) ** 0.5 + common * spectrum.shared**0.5
    each = (len(white), *repeat(1, white.ndim - 1))
    slope = torch.rand(each, generator=generator).mul_(2).sub_(1).mul_(spectrum.exponent_spread)
    frequency = _frequencies(tuple(white.shape[axis] for axis in axes))
    amplitude = frequency ** -(slope + spectrum.exponent)
    contrast = torch.randn(each, generator=generator).mul_(spectrum.contrast_spread).exp_()
    contrast /= torch.exp(torch.tensor(spectrum.contrast_spread**2))  # of mean square 1
    power = amplitude.square().mean(axes, keepdim=True)  # the variance of what is filtered so
    filtered: Tensor = torch.fft.ifftn(torch.fft.fftn(white, dim=axes) * amplitude, dim=axes).real
    pink: Tensor = filtered * contrast / power.sqrt()
    return pink


def _frequencies(sizes: tuple[int, ...]) -> Tensor:
    """Return every frequency's absolute value, for the mean that of the longest wave."""
    squares = torch.zeros(())
    for axis, size in enumerate(sizes):
        own = torch.fft.fftfreq(size).square()
        squares = squares + own.reshape(-1, *repeat(1, len(sizes) - axis - 1))
    frequencies = squares.sqrt()
    frequencies.view(-1)[0] = 1 / max(sizes)
    return frequencies


def _per_channel(values: float | Sequence[float], shape: tuple[int, ...], name: str) -> Tensor:
    given = [float(values)] if isinstance(values, int | float) else [float(v) for v in values]
    channels = shape[1] if len(shape) == 2 or len(shape) > 3 else 1
    if len(given) not in (1, channels):
        raise UsageError(
            f"`probe_{name}` has {len(given)} numbers, but the model's input {shape[1:]} has "
            f"{channels} channels",
            "give one number, or one per channel",
        )
    return torch.tensor(given).reshape(-1, *repeat(1, max(0, len(shape) - 2)))


def _tokens(shape: tuple[int, ...], tokens: int | None, generator: torch.Generator) -> Tensor:
    if not tokens or tokens < 1:
        raise UsageError(
            f"the model takes whole numbers, but how many there are is {tokens or 'unknown'}",
            "say how many tokens the model knows",
        )
    return torch.randint(tokens, shape, generator=generator)
