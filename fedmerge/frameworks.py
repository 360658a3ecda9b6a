"""What other federated-learning frameworks' servers share: matched averages at constant width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from fedmerge import api
from fedmerge.architecture.model_code import Model
from fedmerge.errors import UsageError
from fedmerge.merging.options import MatchOptions
from fedmerge.merging.result import Merge
from fedmerge.values.option_fields import changed
from fedmerge.values.plans import Plan

State: TypeAlias = Mapping[str, torch.Tensor]


class MatchedAverage:
    """Averages the clients of a round; units which do the same are averaged, wherever they stand.

    The model keeps its widths and its code is run once at most, to be planned. `match` are options
    of `fedmerge.match`.
    """

    def __init__(
        self, model: Model | None, plan: Plan | None, match: Mapping[str, Any] | None
    ) -> None:
        self._model, self._plan = model, plan
        self._options = changed(MatchOptions(max_growth=1.0), match or {})
        if self._options.max_growth != 1:
            raise UsageError(
                f"`max_growth` is {self._options.max_growth}, expected 1: clients keep their widths"
            )

    def plan(self, state: State) -> Plan:
        """Return which axes of the clients' tensors carry the same units."""
        if self._plan is None:
            self._plan = api.plan([state], self._options, model=self._model)
        return self._plan

    def merge(self, states: Mapping[str, State], samples: Mapping[str, float]) -> Merge:
        """Return the matched average of two or more clients, each weighted by its samples."""
        plan = self.plan(next(iter(states.values())))
        return api.match(states, self._options, plan=plan, client_weight=dict(samples))


def not_finite(state: State) -> Sequence[str]:
    """Return the names of tensors that hold NaN or Inf."""
    return [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
