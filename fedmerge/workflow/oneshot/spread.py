"""How units vary on probes: means and variances of what layers give, of owners and of merges."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedmerge.probing.calls import Call, LayerCall, names_of, run_heard
from fedmerge.probing.values import Probes
from fedmerge.types.arrays import Float64Array, FloatArray, IntArray
from fedmerge.types.layouts import axis_size
from fedmerge.units import out_places
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.targets import BATCH


@dataclass(frozen=True)
class Spread:
    """Mean and variance of every unit, (units,)."""

    mean: Float64Array
    variance: Float64Array


class SpreadSum:
    """Adds up the moments of rows in double precision, about the first ones' mean."""

    def __init__(self) -> None:
        self.rows = 0
        self._origin: FloatArray = np.zeros(())
        self._sum: FloatArray = np.zeros(())
        self._squares: FloatArray = np.zeros(())

    def add(self, values: Tensor) -> None:
        """Add rows (rows, units)."""
        rows = values.detach().double().cpu().numpy()
        if not self.rows:
            self._origin = rows.mean(0)
        rows = rows - self._origin
        self.rows += len(rows)
        self._sum = self._sum + rows.sum(0)
        self._squares = self._squares + np.square(rows).sum(0)

    def result(self) -> Spread:
        """Return the moments."""
        assert self.rows, "no rows were added"
        shift = self._sum / self.rows
        variance = np.maximum(self._squares / self.rows - shift**2, 0.0)
        return Spread(self._origin + shift, variance)


Spreads: TypeAlias = Mapping[str, Mapping[str, Spread]]  # by weight, and by what they are of


def owners_spreads(
    models: Models, merge: Merge, probes: Probes, *, weights: Collection[str]
) -> Spreads:
    """Return the mean over their owners of units' means and variances, in the order of a run.

    By the plan's name of a layer's (input) weight, and by kind: a layer's `outputs`, or what
    inputs and states add to a recurrent layer's gates. Every client runs once.
    """
    total: dict[str, dict[str, _OwnersSum]] = {}
    for client in range(len(merge.clients)):
        for name, kinds in _client_spreads(models, client, probes, weights).items():
            for kind, spread in kinds.items():
                found = total.setdefault(name, {})
                found.setdefault(kind, _OwnersSum(merge, name)).add(client, spread)
    return {name: {k: own.result() for k, own in kinds.items()} for name, kinds in total.items()}


def given_by(call: Call) -> dict[str, Tensor]:
    """Return what a layer gives (rows, units), by kind."""
    if isinstance(call, LayerCall):
        return {"outputs": call.outputs}
    rows = torch.arange(call.inputs[..., 0].numel())
    return dict(zip(("from_inputs", "from_states"), call.added(rows), strict=True))


def _client_spreads(
    models: Models, client: int, probes: Probes, weights: Collection[str]
) -> dict[str, dict[str, Spread]]:
    sums: dict[str, dict[str, SpreadSum]] = {}

    def hear(call: Call) -> None:
        name = models.own_names[names_of(call)[0]]
        if name in weights:
            for kind, values in given_by(call).items():
                sums.setdefault(name, {}).setdefault(kind, SpreadSum()).add(values)

    model = models.client(client)
    for inputs in probes.batches(BATCH, models.device):
        run_heard(model, inputs, hear)
    return {name: {k: own.result() for k, own in kinds.items()} for name, kinds in sums.items()}


class _OwnersSum:
    """Adds up owners' moments at their global places."""

    def __init__(self, merge: Merge, name: str) -> None:
        self._merge, self._tensor = merge, merge.plan.tensors[name]
        size = axis_size(self._tensor.axes[self._tensor.out], merge.widths)
        self._mean, self._variance, self._owned = (np.zeros(size) for _ in range(3))

    def add(self, client: int, own: Spread) -> None:
        """Add one client's moments times its share, as in an average."""
        merge, tensor = self._merge, self._tensor
        lead = merge.averaging.lead
        led = None if lead is None else self._places(lead)
        places = self._places(client)
        shares = merge.averaging.shares(client, tensor, places=places, led=led)
        self._mean[places] += shares * own.mean
        self._variance[places] += shares * own.variance
        self._owned[places] += shares

    def result(self) -> Spread:
        """Return the owners' mean."""
        owned = np.where(self._owned > 0, self._owned, 1.0)
        return Spread(self._mean / owned, self._variance / owned)

    def _places(self, client: int) -> IntArray:
        merge = self._merge
        return out_places(self._tensor, merge.placements[client], merge.widths)
