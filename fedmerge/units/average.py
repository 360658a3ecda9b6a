"""Average the clients' tensors in the global layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.types.arrays import Float64Array, FloatArray, IntArray
from fedmerge.types.clients import Client
from fedmerge.types.layouts import Widths, axis_size, index_map
from fedmerge.types.plans import Plan, TensorPlan
from fedmerge.units.place import Placement, targets_of
from fedmerge.units.scatter import add_mapped, along


@dataclass(frozen=True)
class Averaging:
    """How much each client counts.

    `shrinkage` is added to the owners' weights of a hidden unit (the paper's posterior mean at
    σ²/σ0²); `recurrent_over_all` divides recurrent tensors by all clients, not by the owners.
    A hidden unit of the `lead` client is that client's alone, whoever else owns it.
    """

    client_weights: tuple[float, ...]
    class_weights: Float64Array | None = None  # (clients, outputs), columns sum to 1
    shrinkage: float = 0.0
    recurrent_over_all: bool = False
    lead: int | None = None  # number of a client

    def shares(
        self, client: int, tensor: TensorPlan, *, places: IntArray, led: IntArray | None
    ) -> Float64Array:
        """Return what a client counts at its places along a tensor's out axis: one number, or each.

        `led` are the places of the lead client.
        """
        weights = self.output_weights(client, tensor)
        if led is None or not tensor.produces:
            return weights
        if self.lead == client:
            return np.array(1.0)  # whatever its weight: nothing is rounded
        return np.asarray(weights * ~np.isin(places, led))

    def output_weights(self, client: int, tensor: TensorPlan) -> Float64Array:
        """Return what a client counts for a tensor: one number, or one per output."""
        if self.class_weights is not None and tensor.makes_outputs:
            return np.asarray(self.class_weights[client])
        return np.array(self.client_weights[client], dtype=np.float64)

    def divisor(self, owned: Float64Array, tensor: TensorPlan) -> Float64Array:
        """Return what a tensor's weighted sum is divided by: per output unit, or one number."""
        if self.recurrent_over_all and tensor.role == "recurrent":
            return np.array(sum(self.client_weights))
        is_hidden = tensor.produces and tensor.role != "pointwise"
        shrinkage = self.shrinkage if is_hidden else 0.0
        return np.where(owned > 0, owned + shrinkage, 1.0)


def average_tensor(
    name: str,
    clients: Sequence[Client],
    plan: Plan,
    *,
    placements: Sequence[Placement],
    widths: Widths,
    averaging: Averaging,
) -> FloatArray:
    """Return one global tensor: each unit's mean over the clients that own it.

    G[u, i] = Σ ω_j W_j[u, i] / Σ ω_j over the owners j of output unit u; an input unit that j
    does not own counts as 0. Every client owns a pinned output.
    """
    tensor = plan.tensors[name]
    led = None if averaging.lead is None else out_places(tensor, placements[averaging.lead], widths)
    total = np.zeros(tuple(axis_size(layout, widths) for layout in tensor.axes))
    owned = np.zeros(total.shape[tensor.out] if tensor.axes else ())
    stored = []
    for number, (client, placement) in enumerate(zip(clients, placements, strict=True)):
        values = client.read(name)
        stored.append(values.dtype)
        maps = [index_map(layout, targets_of(placement), widths) for layout in tensor.axes]
        places = maps[tensor.out] if maps else np.zeros(0, dtype=np.int64)
        weights = averaging.shares(number, tensor, places=places, led=led)
        add_mapped(total, maps, values, along(weights, tensor.out, values.ndim))
        owned[tuple(maps[tensor.out : tensor.out + 1])] += weights
        del values  # before the next client's is read
    total /= along(averaging.divisor(owned, tensor), tensor.out, total.ndim)
    return np.asarray(total, dtype=np.result_type(*stored))


def out_places(tensor: TensorPlan, placement: Placement, widths: Widths) -> IntArray:
    """Return the global places of a client's positions along a tensor's out axis."""
    if not tensor.axes:
        return np.zeros(0, dtype=np.int64)
    return index_map(tensor.axes[tensor.out], targets_of(placement), widths)
