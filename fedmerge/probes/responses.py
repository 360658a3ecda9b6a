"""Unit signatures: how the units of a model respond to probe inputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.probes.layer_calls import Call, LayerCall, run_heard
from fedmerge.probes.probe_inputs import Probes
from fedmerge.values.arrays import FloatArray
from fedmerge.values.plans import Layout, Pinned, Plan, Units, Widths, groups_in, terms

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
