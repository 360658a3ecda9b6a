"""An aggregator for NVFLARE that matches units before it averages them, once per round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fedmerge.architecture.model_code import Model
from fedmerge.errors import TrainingError
from fedmerge.frameworks import MatchedAverage, State, not_finite
from fedmerge.values.arrays import Array


@dataclass(frozen=True)
class Contribution:
    """What one client sent in a round."""

    state: State
    steps: float  # of training: how much it counts
    metrics: Mapping[str, float]
    is_numpy: bool


class MatchedAggregator(ModelAggregator):  # type: ignore[misc]  # NVFLARE has no types
    """Averages clients' whole models; units which do the same are averaged, wherever they stand.

    The global model keeps its widths, so that controllers and clients stay as they are. A net that
    is no plain chain of layers needs its code: `model` is a reference such as "net.py:Net". `match`
    are options of `fedmerge.match`.
    """

    def __init__(self, model: Model | None = None, match: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.model, self.match = model, match  # by these names, jobs say how they were built
        self._average = MatchedAverage(model, None, match)
        self._received: dict[str, Contribution] = {}

    def accept_model(self, model: FLModel) -> None:
        """Take what a client sent; what is not finite is left out."""
        client = str(model.meta.get("client_name", f"client {len(self._received) + 1}"))
        if model.params_type != ParamsType.FULL:
            raise TrainingError(
                f"{client} sent a difference of parameters, expected all of them",
                "let clients send whole models: params_transfer_type FULL",
            )
        state = {name: torch.as_tensor(value) for name, value in model.params.items()}
        if wrong := not_finite(state):
            self.warning(f"{client} is left out: NaN or Inf in its '{wrong[0]}'")
            return
        steps = float(model.meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND, 1))
        metrics = {n: float(v) for n, v in (model.metrics or {}).items() if _is_number(v)}
        is_numpy = any(isinstance(value, np.ndarray) for value in model.params.values())
        self._received[client] = Contribution(state, steps, metrics, is_numpy)

    def aggregate_model(self) -> FLModel:
        """Return the matched average of what was received since the last one."""
        received = {name: self._received[name] for name in sorted(self._received)}
        self.reset_stats()
        if not received:
            raise TrainingError("no client sent a model that can be averaged")
        states = {name: own.state for name, own in received.items()}
        steps = {name: own.steps for name, own in received.items()}
        if len(states) == 1:
            [merged] = states.values()
        else:
            merge = self._average.merge(states, steps)
            merged = merge.state_dict()
            for warning in merge.warnings:
                self.warning(warning)
        is_numpy = any(own.is_numpy for own in received.values())
        return FLModel(
            params_type=ParamsType.FULL,
            params={name: _as_sent(tensor, is_numpy) for name, tensor in merged.items()},
            metrics=_mean_metrics(received),
            meta={"nr_aggregated": len(received)},
        )

    def reset_stats(self) -> None:
        """Forget what was received."""
        self._received = {}


def _as_sent(tensor: torch.Tensor, is_numpy: bool) -> Array | torch.Tensor:
    return tensor.numpy() if is_numpy else tensor


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _mean_metrics(received: Mapping[str, Contribution]) -> dict[str, float]:
    """Return the means of those metrics that every client sent."""
    names = set.intersection(*(set(own.metrics) for own in received.values()))
    steps = [own.steps for own in received.values()]
    return {
        name: float(np.average([own.metrics[name] for own in received.values()], weights=steps))
        for name in sorted(names)
    }
