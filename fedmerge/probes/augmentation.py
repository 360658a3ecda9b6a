"""Other inputs made of probes: views, mixtures and cut-outs, by the kind of input and no labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fedmerge.probes.probe_inputs import IMAGE_AXES, Probes, picture_shape

SMALLEST_VIEW = 0.5  # of an image's area that a view shows
STRETCH = 0.25  # a view's logarithm of width ÷ height is at most ± this
TURN = math.pi / 12  # a view is turned by at most ± this
SEQUENCE_AXES = 3  # samples, steps, features

Augment: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]


def views(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return random parts of images (n, channels, height, width): cut, stretched and turned."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(images), generator=generator)

    side, stretch = uniform(SMALLEST_VIEW, 1.0).sqrt(), uniform(-STRETCH, STRETCH).exp()
    across, down, turn = side * stretch.sqrt(), side / stretch.sqrt(), uniform(-TURN, TURN)
    right, below = uniform(-1, 1) * (1 - across).abs(), uniform(-1, 1) * (1 - down).abs()
    cosine, sine = turn.cos(), turn.sin()
    maps = torch.stack(
        [
            torch.stack([across * cosine, -down * sine, right], dim=1),
            torch.stack([across * sine, down * cosine, below], dim=1),
        ],
        dim=1,
    ).to(images)
    places = functional.affine_grid(maps, list(images.shape), align_corners=False)
    seen: Tensor = functional.grid_sample(
        images, places, padding_mode="reflection", align_corners=False
    )
    return seen


def flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (n, channels, height, width) of which half are mirrored left to right."""
    is_flipped = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(is_flipped.view(-1, 1, 1, 1), images.flip(-1), images)


def mixed(samples: Tensor, generator: torch.Generator) -> Tensor:
    """Return mixtures of samples (n, …), each with another one."""
    others = samples[torch.randperm(len(samples), generator=generator)]
    shares = torch.rand(len(samples), generator=generator).to(samples.dtype)
    own = shares.view(-1, *[1] * (samples.ndim - 1))
    return own * samples + (1 - own) * others


def pasted(samples: Tensor, generator: torch.Generator) -> Tensor:
    """Return samples (n, …) with a box of another one: of pixels, steps or tokens.

    The box's share of the sample is uniform; images' last two axes are cut, others' second one.
    """
    others = samples[torch.randperm(len(samples), generator=generator)]
    axes = (2, 3) if samples.ndim == IMAGE_AXES else (1,)
    share = torch.rand(len(samples), generator=generator)
    is_inside = torch.ones(())
    for axis in axes:
        size = samples.shape[axis]
        length = (size * share ** (1 / len(axes))).round()
        start = (torch.rand(len(samples), generator=generator) * (size - length + 1)).floor()
        place = torch.arange(size).expand(len(samples), size)
        within = (place >= start[:, None]) & (place < (start + length)[:, None])
        shape = [len(samples), *[1] * (samples.ndim - 1)]
        shape[axis] = size
        is_inside = is_inside * within.view(shape)
    return torch.where(is_inside.bool(), others, samples)


AUGMENTATIONS: Mapping[str, Augment] = {
    "views": views,
    "flips": flipped,
    "mixtures": mixed,
    "pastes": pasted,
}
_WAYS: Mapping[str, Sequence[Sequence[str]]] = {  # kind of input → what is done in turn
    "image": (("views", "flips"), ("flips", "pastes"), ("views", "flips", "mixtures")),
    "sequence": (("mixtures",), ("pastes",)),
    "numbers": (("mixtures",),),
    "tokens": (("pastes",), ()),  # of a text, most is learnt as it is
}


def kind_of(inputs: Sequence[Tensor]) -> str | None:
    """Return what kind of input a model takes, or None where several inputs belong together."""
    if len(inputs) != 1 or inputs[0].dtype == torch.bool or inputs[0].ndim < 2:
        return None
    [given] = inputs
    if not given.is_floating_point():
        return "tokens"
    if picture_shape(given.shape) is not None:
        return "image"
    return "sequence" if given.ndim == SEQUENCE_AXES else "numbers"


@dataclass(frozen=True)
class Augmentation:
    """The ways in which probes are changed, one after the other, batch by batch."""

    ways: tuple[tuple[str, ...], ...] = ()

    def batch(self, number: int, probes: Probes, generator: torch.Generator) -> Probes:
        """Return some probes changed in the way whose turn it is."""
        if not self.ways:
            return probes
        [samples] = probes.inputs
        changed = _as_pictures(samples)
        for name in self.ways[number % len(self.ways)]:
            changed = AUGMENTATIONS[name](changed, generator)
        return probes.with_inputs((changed.reshape(samples.shape),))

    def changed(self, probes: Probes, *, seed: int) -> Probes:
        """Return all probes, changed in the first way."""
        return self.batch(0, probes, torch.Generator().manual_seed(seed))

    def copies(self, probes: Probes, count: int, *, seed: int) -> Probes:
        """Return the probes followed by so many changed copies of them."""
        generator = torch.Generator().manual_seed(seed)
        found = probes
        for number in range(count if self.ways else 0):
            found = found.joined(self.batch(number, probes, generator))
        return found

    @property
    def flips(self) -> bool:
        """Whether images are mirrored."""
        return any("flips" in way for way in self.ways)

    def without(self, name: str) -> Augmentation:
        """Return the ways without one kind of change."""
        left = dict.fromkeys(tuple(own for own in way if own != name) for way in self.ways)
        kept = tuple(way for way in left if way or () in self.ways)
        return Augmentation(kept if any(kept) else ())


def augmentation_for(probes: Probes, wanted: Sequence[str] = ()) -> Augmentation:
    """Return the ways to change probes that suit their kind, of those that are wanted if any."""
    kind = kind_of(probes.inputs)
    usual = Augmentation(tuple(map(tuple, _WAYS[kind] if kind else ())))
    unwanted = [name for name in AUGMENTATIONS if wanted and name not in wanted]
    return reduce(Augmentation.without, unwanted, usual)


def mirrored(probes: Probes) -> Probes:
    """Return pictures whose left is right."""
    [samples] = probes.inputs
    return probes.with_inputs((_as_pictures(samples).flip(-1).reshape(samples.shape),))


def _as_pictures(samples: Tensor) -> Tensor:
    shape = picture_shape(samples.shape) if samples.is_floating_point() else None
    return samples if shape is None else samples.view(shape)
