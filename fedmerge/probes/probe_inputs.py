"""Inputs on which all clients are run, without labels, and which of them are pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IMAGE_AXES = 4  # samples, channels, height, width
SMALLEST_SIDE = 16  # of a square that a row of pixels is taken for
COLOURS = (1, 3)


def picture_shape(shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return a picture's shape (n, channels, height, width) for inputs (n, …), None if it is none.

    A row of pixels is taken for a square, grey or in three colours, and so is a square without
    channels: nets of images that begin with a linear or recurrent layer read them so.

    >>> picture_shape((8, 784)), picture_shape((8, 3072)), picture_shape((8, 28, 28))
    ((8, 1, 28, 28), (8, 3, 32, 32), (8, 1, 28, 28))
    >>> picture_shape((8, 100)) is None, picture_shape((8, 50, 28)) is None
    (True, True)
    """
    samples, *own = shape
    if len(own) == IMAGE_AXES - 1:
        return tuple(shape)
    if len(own) == 2 and own[0] == own[1] >= SMALLEST_SIDE:
        return (samples, 1, *own)
    if len(own) == 1:
        for colours in COLOURS:
            side = math.isqrt(own[0] // colours)
            if side >= SMALLEST_SIDE and colours * side * side == own[0]:
                return (samples, colours, side, side)
    return None


@dataclass(frozen=True)
class Probes:
    """Inputs on which all clients are run, without labels."""

    inputs: tuple[Tensor, ...]  # of forward's arguments, each (samples, …), on the CPU
    source: str  # "noise", "synthetic", "generated text" or "data"
    channels_last: bool = False  # how images lie in memory when a model gets them

    def __post_init__(self) -> None:
        assert self.inputs, "a model without inputs has no probes"
        assert all(tensor.ndim for tensor in self.inputs)
        assert len({len(tensor) for tensor in self.inputs}) == 1, "one row per sample"
        assert all(tensor.device.type == "cpu" for tensor in self.inputs)

    def __len__(self) -> int:
        return len(self.inputs[0])

    def batches(self, size: int, device: str) -> Iterator[tuple[Tensor, ...]]:
        """Yield all inputs in order, at most `size` samples at once, on a device."""
        assert size > 0
        for start in range(0, len(self), size):
            yield tuple(self._laid(x[start : start + size].to(device)) for x in self.inputs)

    def _laid(self, batch: Tensor) -> Tensor:
        is_image = batch.dim() == IMAGE_AXES and batch.is_floating_point()
        if not self.channels_last or not is_image:
            return batch
        return batch.contiguous(memory_format=torch.channels_last)

    def first(self, count: int) -> Probes:
        """Return the first so many probes, all if there are fewer."""
        return self.with_inputs(tuple(tensor[:count] for tensor in self.inputs))

    def split(self, held_out: int, *, seed: int) -> tuple[Probes, Probes]:
        """Return (samples - held_out) and held_out probes, disjoint, drawn at random."""
        assert 0 <= held_out <= len(self)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        kept = len(self) - held_out
        return self._rows(order[:kept]), self._rows(order[kept:])

    def joined(self, other: Probes) -> Probes:
        """Return these probes followed by others of the same shapes and dtypes."""
        pairs = list(zip(self.inputs, other.inputs, strict=True))
        assert all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs)
        sources = dict.fromkeys([*self.source.split(" and "), *other.source.split(" and ")])
        joined = tuple(torch.cat(pair) for pair in pairs)
        return replace(self, inputs=joined, source=" and ".join(sources))

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> Probes:
        """Return other inputs of the same source."""
        return replace(self, inputs=inputs)

    def drawn(self, count: int, generator: torch.Generator) -> Probes:
        """Return some of the probes, drawn at random."""
        return self._rows(torch.randperm(len(self), generator=generator)[:count])

    @property
    def bytes(self) -> int:
        """How much memory the inputs take."""
        return sum(tensor.nbytes for tensor in self.inputs)

    def _rows(self, rows: Tensor) -> Probes:
        return self.with_inputs(tuple(tensor[rows] for tensor in self.inputs))
