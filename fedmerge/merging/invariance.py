"""What holds of a model's layers, seen on a few inputs: equal rows, norms of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture.model_code import outputs_of
from fedmerge.matching.features import place_tensor, targets_of
from fedmerge.merging.client_modules import ClientModules
from fedmerge.probes.layer_calls import Call, run_heard
from fedmerge.probes.responses import Reading, readings
from fedmerge.values.arrays import Array
from fedmerge.values.plans import Assignment, Norm, index_map

EQUAL = 1e-3  # of the largest value: what the order of sums may change, generously
FACTOR = 2.0  # by which what a batch norm reads is rescaled, to see who else reads it


def steady_weights(modules: ClientModules, inputs: tuple[Tensor, ...]) -> frozenset[str]:
    """Return the weights, by the plan's names, that read the same rows whatever units' order is.

    A layer along another axis, such as a mixer's over tokens, has a row per hidden unit of that
    axis: rows of two clients, or of a client and a merge, are then of different units. The first
    client runs as it is and with the units of every group moved on by one.
    """
    session = modules.session
    client, plan, widths = session.aligned[0], session.plan, session.client_widths[0]
    moves = {g: Assignment(np.roll(np.arange(w), 1), w) for g, w in widths.items()}
    moved = {n: place_tensor(client.read(n), t, moves, widths) for n, t in plan.tensors.items()}
    before, after = (_read(modules, m, inputs) for m in (modules.client(0), modules.merged(moved)))
    if [reading.weight for reading in before] != [reading.weight for reading in after]:
        return frozenset()
    unsteady = {
        one.weight
        for one, other in zip(before, after, strict=True)
        if not _is_moved(
            one.values, other.values, index_map(one.layout, targets_of(moves), widths).tolist()
        )
    }
    return frozenset(reading.weight for reading in before) - unsteady


def own_norms(modules: ClientModules, inputs: tuple[Tensor, ...]) -> tuple[Norm, ...]:
    """Return the plan's batch norms that alone read what they normalise.

    It may be rescaled then, with the norm's statistics, and no output changes; where a residual
    stream or later layers read it too, outputs do.
    """
    session = modules.session
    client, plan = session.aligned[0], session.plan
    given = tuple(tensor.to(modules.device) for tensor in inputs)
    arrays = {name: client.read(name) for name in plan.tensors}
    before = outputs_of(modules.merged(arrays), given)

    def are_own(norms: Sequence[Norm]) -> bool:
        rescaled = {k: v for norm in norms for k, v in _rescaled(norm, arrays).items()}
        after = outputs_of(modules.merged({**arrays, **rescaled}), given)
        return all(map(_is_equal, before, after))

    return plan.norms if are_own(plan.norms) else tuple(n for n in plan.norms if are_own([n]))


def _rescaled(norm: Norm, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the producer of a norm times a factor, and statistics that take it back."""
    names = (norm.producer, norm.bias, norm.mean)
    found = {name: FACTOR * arrays[name] for name in names if name is not None}
    return {**found, norm.variance: FACTOR**2 * (arrays[norm.variance] + norm.eps) - norm.eps}


def _read(modules: ClientModules, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Reading]:
    calls: list[Call] = []
    run_heard(model, [given.to(modules.device) for given in inputs], calls.append)
    plan, names = modules.session.plan, modules.own_names
    return [reading for call in calls for reading in readings(call, plan, names)]


def _is_moved(before: Tensor, after: Tensor, places: list[int]) -> bool:
    """Return whether rows are as before, but for the places of their columns."""
    if before.shape != after.shape:
        return False
    return _is_equal(before, after[:, places])


def _is_equal(before: Tensor, after: Tensor) -> bool:
    tolerance = EQUAL * float(before.abs().max()) if before.numel() else 0.0
    return torch.allclose(before, after, rtol=0, atol=tolerance, equal_nan=True)
