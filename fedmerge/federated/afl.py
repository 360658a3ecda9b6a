"""Agnostic federated learning (Mohri, Sivek and Suresh, 2019): the worst mixture of clients counts.

w ← Σ λ_j w_j                       the clients' models, as in FedAvg
λ ← Π(λ + γ (L_1, …, L_J))          their losses; Π: the nearest weights that sum to 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedmerge.federated.fedavg import FedAvg
from fedmerge.federated.federation import Exchange, Federation, Round
from fedmerge.merging.averages import Averaging
from fedmerge.values.arrays import Float64Array


@dataclass(frozen=True)
class AgnosticAveraging(FedAvg):
    """FedAvg in which clients with high losses count more from round to round."""

    rate: float = 0.1  # γ

    def start(self) -> Federation:
        """Return the clients as they came; they count as in FedAvg."""
        weights = np.array(self.averaging.client_weights)
        return replace(super().start(), weights=tuple((weights / weights.sum()).tolist()))

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Average the models of the clients that are present as they count by now."""
        weights = federation.weights
        if not sum(weights[client] for client in present):
            weights = (1.0,) * len(weights)  # nobody who counts is there: all others alike
        counted: FedAvg = replace(self, averaging=Averaging(weights))
        return FedAvg.exchange(counted, federation, current, present)

    def weigh(self, federation: Federation, losses: Mapping[str, float]) -> Federation:
        """Let clients count more, the higher their losses are; who told none counts as the mean."""
        if not losses:
            return federation
        mean = sum(losses.values()) / len(losses)
        ascent = np.array([losses.get(model.name, mean) - mean for model in federation.locals])
        weights = nearest_weights(np.array(federation.weights) + self.rate * ascent)
        return replace(federation, weights=tuple(weights.tolist()))


def nearest_weights(values: Float64Array) -> Float64Array:
    """Return the nearest numbers (clients,) of which none is negative and that sum to 1.

    max(v - t, 0), with the t at which they do (Duchi and others, 2008).
    """
    falling = np.sort(values)[::-1]
    counts = np.arange(1, len(values) + 1)
    shifts = (np.cumsum(falling) - 1) / counts
    shift = shifts[np.flatnonzero(falling > shifts)[-1]]
    return np.asarray(np.maximum(values - shift, 0.0))
