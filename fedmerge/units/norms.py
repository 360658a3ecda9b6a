"""Give averaged units the norms that their owners' weights have: averaging shrinks them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmerge.types.arrays import Array, Float64Array, FloatArray
from fedmerge.types.clients import Client
from fedmerge.types.layouts import Widths
from fedmerge.types.plans import Plan
from fedmerge.units.average import Averaging, out_places
from fedmerge.units.place import Placement
from fedmerge.units.scatter import along

MATRIX = 2  # axes of the least tensor that makes units of others; a bias has one


def has_norms(plan: Plan, name: str) -> bool:
    """Return whether a tensor's rows are hidden units' incoming weights whose length matters.

    Behind a batch norm it does not. Outputs are no hidden units: their mean is what is wanted.
    """
    tensor = plan.tensors[name]
    is_free = all(norm.producer != name for norm in plan.norms)
    is_incoming = tensor.role != "pointwise" and len(tensor.axes) >= MATRIX
    return bool(tensor.produces) and is_incoming and is_free


def with_owners_norms(
    name: str,
    averaged: FloatArray,
    clients: Sequence[Client],
    plan: Plan,
    *,
    placements: Sequence[Placement],
    widths: Widths,
    averaging: Averaging,
) -> FloatArray:
    """Return an averaged tensor whose rows are as long as their owners' are in the mean.

    G[u] ← G[u] · (Σ ω_j |W_j[u]| / Σ ω_j) / |G[u]| over the owners j of unit u. A unit of a single
    owner, or of the lead, keeps its row to the last bit.
    """
    if not has_norms(plan, name):
        return averaged
    tensor = plan.tensors[name]
    led = None if averaging.lead is None else out_places(tensor, placements[averaging.lead], widths)
    lengths, owned, owners = (np.zeros(averaged.shape[tensor.out]) for _ in range(3))
    for number, (client, placement) in enumerate(zip(clients, placements, strict=True)):
        places = out_places(tensor, placement, widths)
        weights = averaging.shares(number, tensor, places=places, led=led)
        lengths[places] += weights * row_norms(client.read(name), tensor.out)
        owned[places] += weights
        owners[places] += weights > 0
    own = row_norms(averaged, tensor.out)
    is_shared = (owners > 1) & (own > 0)
    factors = np.ones_like(own)
    np.divide(lengths, owned * own, out=factors, where=is_shared)
    return np.asarray(averaged * along(factors, tensor.out, averaged.ndim), averaged.dtype)


def row_norms(values: Array, out: int) -> Float64Array:
    """Return the Euclidean norm of every position along the out axis."""
    others = tuple(axis for axis in range(values.ndim) if axis != out)
    return np.asarray(np.sqrt(np.sum(np.square(values, dtype=np.float64), axis=others)))
