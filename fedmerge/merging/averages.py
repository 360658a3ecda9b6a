"""Averages of global units over the clients that own them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from fedmerge.checkpoint import non_finite, torch_dtype
from fedmerge.errors import UsageError
from fedmerge.matching.features import Placement, add_mapped, along, targets_of
from fedmerge.merging.client_sources import pieces_of
from fedmerge.merging.options import NO_LEAD, Dials, MatchOptions
from fedmerge.values.arrays import Float64Array, FloatArray, IntArray
from fedmerge.values.clients import Client
from fedmerge.values.plans import Layout, Plan, TensorPlan, Widths, axis_size, groups_in, index_map
from fedmerge.values.wording import listed

PIECE = 1 << 18  # numbers averaged at once: sums in double precision then stay in a core's cache


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
        self,
        client: int,
        tensor: TensorPlan,
        *,
        places: IntArray,
        led: IntArray | None,
        leading: Float64Array,
    ) -> Float64Array:
        """Return what a client counts at its places along a tensor's out axis: one number, or each.

        `led` are the places of the lead client; other units count as they are `leading`.
        """
        weights = self.output_weights(client, tensor)
        if not tensor.produces:
            return weights
        if led is None:
            return np.asarray(weights * leading)
        if self.lead == client:
            return np.array(1.0)  # whatever its weight: nothing is rounded
        return np.asarray(weights * leading * ~np.isin(places, led))

    def output_weights(self, client: int, tensor: TensorPlan) -> Float64Array:
        """Return what a client counts for a tensor: one number, or one per output."""
        if self.class_weights is not None and tensor.makes_outputs:
            return np.asarray(self.class_weights[client])
        return np.array(self.client_weights[client], dtype=np.float64)

    def client_shares(self, tensor: TensorPlan) -> tuple[float, ...] | None:
        """Return what each client counts for all of a tensor's numbers; None where they differ."""
        is_by_class = self.class_weights is not None and tensor.makes_outputs
        is_by_unit = self.lead is not None or self.shrinkage > 0 or self.recurrent_over_all
        return None if is_by_class or is_by_unit else self.client_weights

    def divisor(self, owned: Float64Array, tensor: TensorPlan) -> Float64Array:
        """Return what a tensor's weighted sum is divided by: per output unit, or one number."""
        if self.recurrent_over_all and tensor.role == "recurrent":
            return np.array(sum(self.client_weights))
        is_hidden = tensor.produces and tensor.role != "pointwise"
        shrinkage = self.shrinkage if is_hidden else 0.0
        return np.where(owned > 0, owned + shrinkage, 1.0)


NO_LEADERS: Mapping[str, IntArray] = MappingProxyType({})


def average_tensor(
    name: str,
    clients: Sequence[Client],
    plan: Plan,
    *,
    placements: Sequence[Placement],
    widths: Widths,
    averaging: Averaging,
    leaders: Mapping[str, IntArray] = NO_LEADERS,
) -> FloatArray:
    """Return one global tensor: each unit's mean over the clients that own it.

    G[u, i] = Σ ω_j W_j[u, i] / Σ ω_j over the owners j of output unit u; an input unit that j
    does not own counts as 0. Every client owns a pinned output. `leaders` are the clients whose
    units (width,) a group's stand for.
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
        leading = (
            leading_shares(tensor.axes[tensor.out], number, placement, leaders, widths)
            if maps
            else ALL_OF_IT
        )
        weights = averaging.shares(number, tensor, places=places, led=led, leading=leading)
        add_mapped(total, maps, values, along(weights, tensor.out, values.ndim))
        owned[tuple(maps[tensor.out : tensor.out + 1])] += weights
        del values  # before the next client's is read
    total /= along(averaging.divisor(owned, tensor), tensor.out, total.ndim)
    return np.asarray(total, dtype=np.result_type(*stored))


FAINT = 1e-9  # what a client counts for a unit that another one's stands for
ALL_OF_IT = np.array(1.0)


def leading_shares(
    layout: Layout,
    client: int,
    placement: Placement,
    leaders: Mapping[str, IntArray],
    widths: Widths,
) -> Float64Array:
    """Return 1 along an axis where a client's units are those that global ones stand for.

    Elsewhere next to nothing: nothing at all would leave places whose groups have different
    leaders to nobody. One number where all count alike.
    """
    if leaders.keys().isdisjoint(groups_in(layout)):
        return ALL_OF_IT
    targets = targets_of(placement)
    led = {
        group: own[leaders[group][own] == client] if group in leaders else own
        for group, own in targets.items()
    }
    places = index_map(layout, targets, widths)
    return np.where(np.isin(places, index_map(layout, led, widths)), 1.0, FAINT)


def mean_pieces(
    name: str, clients: Sequence[Client], weights: Sequence[float], dtype: str
) -> Iterator[torch.Tensor]:
    """Yield the mean of tensors whose numbers lie at the same places, in flat pieces of a dtype.

    Numbers are those of `average_tensor`, but no more of them are in memory than a piece has.
    """
    total_weight = sum(weights)
    for parts in zip(*(pieces_of(client, name, PIECE) for client in clients), strict=True):
        total = torch.zeros(len(parts[0]), dtype=torch.float64)
        for weight, part in zip(weights, parts, strict=True):
            wide = part.double()
            total += wide if weight == 1 else wide.mul_(weight)
        total /= total_weight
        _check_finite(total, name, clients)
        yield _rounded(total, parts, dtype)


def changed_pieces(
    name: str,
    clients: Sequence[Client],
    weights: Sequence[float],
    dtype: str | None,
    *,
    base: Client,
    scale: float,
) -> Iterator[torch.Tensor]:
    """Yield base + scale · Σ ω_j (W_j - base) / Σ ω_j; at a scale of 1, that is the clients' mean.

    In flat pieces, of a dtype or as precise as they were read.
    """
    for parts in zip(*(pieces_of(own, name, PIECE) for own in (base, *clients)), strict=True):
        start = parts[0].double()
        total = torch.zeros_like(start)
        for weight, part in zip(weights, parts[1:], strict=True):
            total += weight * (part.double() - start)
        total = start + scale / sum(weights) * total
        _check_finite(total, name, (base, *clients))
        yield _rounded(total, parts, dtype)


def _check_finite(values: torch.Tensor, name: str, clients: Sequence[Client]) -> None:
    """Refuse numbers that are not finite, and tell whose they are."""
    if any(non_finite(values)):
        for client in clients:
            client.read(name)


def _rounded(
    values: torch.Tensor, parts: Sequence[torch.Tensor], dtype: str | None
) -> torch.Tensor:
    """Return values in single precision, as `Client.read` has it, unless parts are in double."""
    is_wide = any(part.dtype == torch.float64 for part in parts)
    read = values if is_wide else values.float()
    return read if dtype is None else read.to(torch_dtype(dtype))


def out_places(tensor: TensorPlan, placement: Placement, widths: Widths) -> IntArray:
    """Return the global places of a client's positions along a tensor's out axis."""
    if not tensor.axes:
        return np.zeros(0, dtype=np.int64)
    return index_map(tensor.axes[tensor.out], targets_of(placement), widths)


MOST_NAMES = 8  # clients that a hint names


def averaging_for(
    options: MatchOptions, dials: Dials, plan: Plan, clients: Sequence[Client]
) -> Averaging:
    """Return how much each client counts, from the options."""
    weights = client_weights(options.client_weight, clients)
    shrinkage = 0.0
    if dials.posterior_mean and not plan.is_recurrent:
        assert dials.sigma is not None
        assert dials.sigma0 is not None
        shrinkage = dials.sigma / dials.sigma0
    return Averaging(
        client_weights=weights,
        class_weights=_class_weights(options.class_counts, weights, plan, clients),
        shrinkage=shrinkage,
        recurrent_over_all=dials.posterior_mean,
        lead=_lead(options.lead, clients),
    )


def _lead(name: str | None, clients: Sequence[Client]) -> int | None:
    if name is None or name == NO_LEAD:
        return None
    names = [client.name for client in clients]
    if name not in names:
        raise UsageError(
            f"`lead` names '{name}', which is no client",
            f"the clients are {listed(names, MOST_NAMES)}",
        )
    return names.index(name)


def client_weights(given: Mapping[str, float], clients: Sequence[Client]) -> tuple[float, ...]:
    """Return how much each client counts: as given by name, else 1."""
    names = [client.name for client in clients]
    for name in given:
        if name not in names:
            raise UsageError(
                f"`client_weight` names '{name}', which is no client",
                f"the clients are {listed(names, MOST_NAMES)}",
            )
    return tuple(float(given.get(name, 1.0)) for name in names)


def _class_weights(
    counts: Mapping[str, Sequence[float]] | None,
    weights: Sequence[float],
    plan: Plan,
    clients: Sequence[Client],
) -> Float64Array | None:
    """Return p (clients, classes): each client's share of a class, by weights where it has none."""
    if counts is None:
        return None
    outputs = {axis_size(t.axes[t.out], {}) for t in plan.tensors.values() if t.makes_outputs}
    names = [client.name for client in clients]
    if set(counts) != set(names):
        raise UsageError(
            f"`class_counts` has the clients {listed(list(counts), MOST_NAMES)}, "
            f"expected {listed(names, MOST_NAMES)}",
            'the file holds {"name": [count per class, …]} with the names that `match` prints',
        )
    lengths = {len(counts[name]) for name in names}
    if lengths != outputs:
        raise UsageError(
            f"`class_counts` has {_list(lengths)} classes, the last layer {_list(outputs)} outputs"
        )
    table = np.array([counts[name] for name in names], dtype=np.float64)
    if not np.isfinite(table).all() or (table < 0).any():
        raise UsageError("`class_counts` has a count that is negative or no number")
    by_weight = np.asarray(weights)[:, None] / sum(weights) * np.ones_like(table)
    totals = table.sum(axis=0)
    return np.where(totals > 0, table / np.where(totals > 0, totals, 1.0), by_weight)


def _list(values: set[int]) -> str:
    return " or ".join(map(str, sorted(values))) or "no"
