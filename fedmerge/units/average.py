"""Average the clients' tensors in the global layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.types.arrays import Float64Array, FloatArray
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
    """

    client_weights: tuple[float, ...]
    class_weights: Float64Array | None = None  # (clients, outputs), columns sum to 1
    shrinkage: float = 0.0
    recurrent_over_all: bool = False

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
    total = np.zeros(tuple(axis_size(layout, widths) for layout in tensor.axes))
    owned = np.zeros(total.shape[tensor.out] if tensor.axes else ())
    stored = []
    for number, (client, placement) in enumerate(zip(clients, placements, strict=True)):
        values = client.read(name)
        stored.append(values.dtype)
        weights = averaging.output_weights(number, tensor)
        maps = [index_map(layout, targets_of(placement), widths) for layout in tensor.axes]
        add_mapped(total, maps, values, along(weights, tensor.out, values.ndim))
        owned[tuple(maps[tensor.out : tensor.out + 1])] += weights
        del values  # before the next client's is read
    total /= along(averaging.divisor(owned, tensor), tensor.out, total.ndim)
    return np.asarray(total, dtype=np.result_type(*stored))
