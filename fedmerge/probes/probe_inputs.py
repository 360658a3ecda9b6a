"""Inputs on which all clients are run, without labels, and which of them are pictures."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.probes.layer_calls import Call, LayerCall, run_heard
from fedmerge.values.arrays import FloatArray
from fedmerge.values.plans import Layout, Pinned, Plan, Units, Widths, groups_in, terms

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


COLUMNS = 2048  # responses that are kept of a unit, per weight that reads it


BATCH = 128  # samples run at once


@dataclass(frozen=True)
class Reading:
    """Values along one axis of a weight, as the weight reads them."""

    weight: str
    layout: Layout  # of the axis
    values: Tensor  # (rows, axis)


def unit_responses(
    model: nn.Module,
    plan: Plan,
    widths: Widths,
    probes: Probes,
    *,
    names: Mapping[str, str],
    seed: int,
    device: str,
) -> dict[str, FloatArray]:
    """Return the responses (units, columns) of every group's units that some weight reads.

    The values that weights read, after non-linearities and pooling: a random part of all samples
    and places, the same for every client with the same seed. `names`: model's → plan's tensors;
    what other weights read does not count.
    """
    found: dict[str, list[Tensor]] = {}
    per_batch = -(-COLUMNS * BATCH // len(probes))
    for number, batch in enumerate(probes.batches(BATCH, device)):

        def hear(call: Call, number: int = number) -> None:
            for reading in readings(call, plan, names):
                for group in dict.fromkeys(groups_in(reading.layout)):
                    each = _pinned_places(reading.layout, group, widths)
                    rows = _some_rows(reading, per_batch // each + 1, (seed, number))
                    columns = _columns(reading.values[rows], reading.layout, group, widths)
                    found.setdefault(group, []).append(columns.float().cpu())

        run_heard(model, batch, hear)
    return {group: torch.cat(parts, dim=1).numpy() for group, parts in found.items()}


def readings(call: Call, plan: Plan, names: Mapping[str, str]) -> Iterator[Reading]:
    """Yield what the weights of a call read, along axes that the plan describes."""
    if isinstance(call, LayerCall):
        read = [(call.weight, call.in_axis, call.inputs)]
    else:
        read = [(call.weight_ih, 1, call.inputs), (call.weight_hh, 1, call.states[1:])]
    for model_name, axis, values in read:
        name = names.get(model_name)
        if name is not None and name in plan.tensors:
            yield Reading(name, plan.tensors[name].axes[axis], values.reshape(-1, values.shape[-1]))


def _columns(values: Tensor, layout: Layout, group: str, widths: Widths) -> Tensor:
    """Return the columns (units, rows × places) of a group's units in values (rows, axis).

    Where units stand beside another group's, as heads around their units do, their mean and mean
    square over these count: the other units' order is every client's own. Of units that have own
    orders in the units around them every one counts by itself (outer units × units, …).
    """
    found = []
    for term in terms(layout, widths):
        place, around = term.units(group), term.around(group)
        if place is None:
            continue
        own = values[:, torch.from_numpy(term.positions).to(values.device)]  # (rows, factors…)
        leading = [place] if around is None else [around, place]
        others = _others(term.factors, leading)
        if others:
            parts = (own.mean(others, keepdim=True), own.square().mean(others, keepdim=True))
            own = torch.stack(parts, dim=-1)
        own = own.movedim([1 + k for k in leading], [*range(len(leading))])
        found.append(own.flatten(len(leading)).flatten(0, len(leading) - 1))
    return torch.cat(found, dim=1)


def _others(factors: Sequence[Units | Pinned], leading: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of (rows, factors…) that are units of other groups than the leading ones."""
    others = [isinstance(factor, Units) and k not in leading for k, factor in enumerate(factors)]
    return tuple(1 + k for k, is_other in enumerate(others) if is_other)


def _pinned_places(layout: Layout, group: str, widths: Widths) -> int:
    """Return how many places every unit of a group has along an axis, whatever the widths."""
    own = (term.factors for term in terms(layout, widths) if term.units(group) is not None)
    return sum(math.prod(f.size for f in factors if isinstance(f, Pinned)) for factors in own)


def _some_rows(reading: Reading, count: int, seed: tuple[int, int]) -> Tensor:
    """Return some row numbers, the same wherever the same weight reads as many rows."""
    total = len(reading.values)
    if count >= total:
        return torch.arange(total)
    rng = np.random.default_rng([*seed, zlib.crc32(reading.weight.encode())])
    return torch.from_numpy(rng.choice(total, count, replace=False))


def normalised(responses: FloatArray) -> FloatArray:
    """Return responses about their means at length 1: products are correlations.

    A unit that never responds otherwise than always is 0, and so is what is no number.
    """
    responses = np.nan_to_num(responses.astype(np.float64), posinf=0.0, neginf=0.0)
    centred = responses - responses.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    quiet = lengths <= 1e-6 * np.maximum(np.abs(responses).max(axis=1, keepdims=True), 1e-30)
    return np.where(quiet, 0, centred / np.where(quiet, 1, lengths)).astype(np.float32)
