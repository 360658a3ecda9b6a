"""What fitted layers should give: the owners' mean of what the clients' layers give on probes."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedmerge.matching.features import targets_of
from fedmerge.merging.averages import leading_shares
from fedmerge.merging.client_modules import ClientModules
from fedmerge.merging.result import Merge
from fedmerge.probes.layer_calls import Call, CellCall, LayerCall, names_of, run_heard
from fedmerge.probes.probe_inputs import Probes
from fedmerge.values.arrays import Float64Array, IntArray
from fedmerge.values.plans import Layout, Norm, axis_size, index_map

BATCH = 128  # samples run at once
ROWS = 24_000  # of a layer's outputs that it is fitted to, at most
HELD_OUT_ROWS = 2_000  # that choose among the strengths of a ridge, at most
ROWS_PER_INPUT = 4  # of a layer: more hardly change what it is fitted to
FEWEST_ROWS = 8_000  # as long as there are so many
MOST_NUMBERS = 1 << 28  # of all targets together (1 GB in single precision)

Values: TypeAlias = dict[str, tuple[Layout, Tensor]]  # layout and values (rows, axis) of each kind


@dataclass
class Part:
    """Targets of a layer for one batch: sums over clients while they are collected, then means.

    By kind: a layer's `outputs`; of a recurrent layer what its inputs (`from_inputs`) and its
    states (`from_states`) add to its gates, and the `states` before each step.
    """

    rows: Tensor  # places among the rows of a call
    values: dict[str, Tensor] = field(default_factory=dict)  # (rows, global axis)
    owned: dict[str, Tensor] = field(default_factory=dict)  # (global axis,) or one number

    def add(self, what: str, values: Tensor, places: Tensor, size: int, weights: Tensor) -> None:
        """Add a client's values (rows, axis) times its weights, at their global places."""
        if what not in self.values:
            self.values[what] = torch.zeros(len(values), size, dtype=values.dtype)
            self.owned[what] = torch.zeros(size, dtype=values.dtype)
        self.values[what].index_add_(1, places, values * weights)
        self.owned[what].index_add_(0, places, weights)

    def mean(self, what: str) -> Tensor:
        """Return the owners' mean (rows, global axis)."""
        owned = self.owned[what]
        return self.values[what] / torch.where(owned > 0, owned, 1.0)


Targets: TypeAlias = Mapping[str, Mapping[int, Part]]  # by (input) weight and number of batch


def collect_targets(
    modules: ClientModules,
    merges: Sequence[Merge],
    probes: Probes,
    *,
    weights: Collection[str],
    seed: int,
    most_rows: int = ROWS,
) -> list[Targets]:
    """Return every merge's targets of layers, by their (input) weights' names, in a run's order.

    The merges differ in how much clients count, so that every client runs once for all of them.
    Of each batch some rows are kept, the same ones of every client.
    """
    targets: list[dict[str, dict[int, Part]]] = [{} for _ in merges]
    rows = min(most_rows, _most_rows(merges, weights))
    per_batch: dict[str, int] = {}  # by weight: as many of every client, however wide it is
    for client in range(len(merges[0].clients)):
        model = modules.client(client)
        for number, inputs in enumerate(probes.batches(BATCH, modules.device)):

            def hear(call: Call, client: int = client, number: int = number) -> None:
                name = modules.own_names[names_of(call)[0]]
                if name not in weights:
                    return
                count = per_batch.setdefault(name, -(-_needed(call, rows) * BATCH // len(probes)))
                places = some_rows(name, call, count, (seed, number))
                for merge, collected in zip(merges, targets, strict=True):
                    part = collected.setdefault(name, {}).setdefault(number, Part(places))
                    _add(part, modules, merge, client, name, call)

            run_heard(model, inputs, hear)
    return list(targets)


def used_once(
    modules: ClientModules, merge: Merge, inputs: tuple[Tensor, ...], weights: Collection[str]
) -> frozenset[str]:
    """Return the names of layers that a run uses once, of those whose weights are all given."""
    calls: list[Call] = []
    model = modules.client(0)
    uses = run_heard(model, inputs, calls.append).uses
    named = [tuple(modules.own_names[weight] for weight in names_of(call)) for call in calls]
    repeated = {modules.own_names[weight] for weight, times in uses.items() if times > 1}
    known = set(weights) & set(merge.plan.tensors) - repeated
    return frozenset(names[0] for names in named if set(names) <= known)


def _most_rows(merges: Sequence[Merge], weights: Collection[str]) -> int:
    """Return how many rows of every layer are kept, so that all together fit into memory."""
    planned = [(merge, merge.plan.tensors[name]) for merge in merges for name in weights]
    width = sum(axis_size(tensor.axes[tensor.out], m.widths) for m, tensor in planned)
    return max(1, min(ROWS, MOST_NUMBERS // max(1, width)))


def _needed(call: Call, most: int) -> int:
    """Return how many rows, of the most that there are, tell enough of a layer."""
    return min(most, max(FEWEST_ROWS, ROWS_PER_INPUT * call.reads))


def some_rows(name: str, call: Call, count: int, seed: tuple[int, int]) -> Tensor:
    """Return which rows of a call count, the same for every model."""
    total = len(call.outputs) if isinstance(call, LayerCall) else call.inputs[..., 0].numel()
    if count >= total:
        return torch.arange(total)
    rng = np.random.default_rng([*seed, zlib.crc32(name.encode())])
    return torch.from_numpy(np.sort(rng.choice(total, count, replace=False)))


def _add(
    part: Part, modules: ClientModules, merge: Merge, client: int, name: str, call: Call
) -> None:
    values = (
        _layer_values(merge, client, name, call, part.rows)
        if isinstance(call, LayerCall)
        else _cell_values(modules, merge, call, part.rows)
    )
    for what, (layout, own) in values.items():
        places, size = _places(merge, client, layout), axis_size(layout, merge.widths)
        weights = np.broadcast_to(_shares(merge, client, name, layout, places), len(places))
        shares = torch.tensor(weights, dtype=own.dtype)
        part.add(what, own.cpu(), torch.from_numpy(places), size, shares)


def _places(merge: Merge, client: int, layout: Layout) -> IntArray:
    return index_map(layout, targets_of(merge.placements[client]), merge.widths)


def _shares(merge: Merge, client: int, name: str, layout: Layout, places: IntArray) -> Float64Array:
    """Return what a client counts at its places, as in an average."""
    averaging = merge.session.averaging
    led = None if averaging.lead is None else _places(merge, averaging.lead, layout)
    tensor, placement = merge.plan.tensors[name], merge.placements[client]
    leading = leading_shares(layout, client, placement, merge.leaders, merge.widths)
    return averaging.shares(client, tensor, places=places, led=led, leading=leading)


def _layer_values(merge: Merge, client: int, name: str, call: LayerCall, rows: Tensor) -> Values:
    """Return a layer's outputs, with the batch norm that follows it."""
    tensor, outputs = merge.plan.tensors[name], call.outputs[rows]
    norm = merge.norm_of(name)
    if norm is not None:
        scale, shift = (torch.from_numpy(part).to(outputs) for part in _affine(merge, client, norm))
        outputs = scale * outputs + shift
    return {"outputs": (tensor.axes[tensor.out], outputs)}


def _affine(merge: Merge, client: int, norm: Norm) -> tuple[Float64Array, Float64Array]:
    """Return what a client's batch norm does in evaluation: scale · x + shift."""
    read = merge.session.aligned[client].read
    scale = (read(norm.scale) if norm.scale else 1.0) / np.sqrt(read(norm.variance) + norm.eps)
    shift = (read(norm.shift) if norm.shift else 0.0) - scale * read(norm.mean)
    return np.asarray(scale, np.float64), np.asarray(shift, np.float64)


def _cell_values(modules: ClientModules, merge: Merge, call: CellCall, rows: Tensor) -> Values:
    """Return what inputs and states add to a recurrent layer's gates, and the states before."""
    tensors, own = merge.plan.tensors, modules.own_names
    gates = tensors[own[call.weight_ih]].axes[0]
    from_inputs, from_states = call.added(rows)
    return {
        "from_inputs": (gates, from_inputs),
        "from_states": (gates, from_states),
        "states": (tensors[own[call.weight_hh]].axes[1], call.state_rows(rows)),
    }
