"""A strategy of Flower's that matches units before it averages them, once per round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedmerge import api
from fedmerge.architecture.model_code import Model
from fedmerge.errors import UsageError
from fedmerge.merging.options import MatchOptions
from fedmerge.values.option_fields import changed
from fedmerge.values.plans import Plan


class MatchedAveraging(FedAvg):
    """FedAvg, except that units which do the same are averaged, wherever clients have them.

    The global model keeps its widths, so that any ClientApp can stay as it is; its replies hold
    torch state dicts. A net that is no plain chain of layers needs its code: `model` builds it, as
    for `fedmerge.match`. `match` are further options of `fedmerge.match`; all other keywords are
    FedAvg's.
    """

    def __init__(
        self,
        *,
        model: Model | None = None,
        plan: Plan | None = None,
        match: Mapping[str, Any] | None = None,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self._model, self._plan = model, plan
        self._options = changed(MatchOptions(max_growth=1.0), match or {})
        if self._options.max_growth != 1:
            raise UsageError(
                f"`max_growth` is {self._options.max_growth}, expected 1: clients keep their widths"
            )

    def summary(self) -> None:
        """Log what the strategy does."""
        super().summary()
        log(INFO, "\t└──> Units are matched before they are averaged")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure a round; before the first one, find out which axes carry the same units."""
        if self._plan is None:
            state = arrays.to_torch_state_dict()
            self._plan = api.plan([state], self._options, model=self._model)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the matched average of the replies, and the mean of their metrics."""
        usable = [reply for reply in replies if reply.has_error() or _is_finite(reply)]
        averaged, metrics = super().aggregate_train(server_round, usable)
        counting = {
            f"node {reply.metadata.src_node_id}": reply.content
            for reply in sorted(usable, key=lambda reply: reply.metadata.src_node_id)
            if not reply.has_error() and self._samples(reply.content) > 0
        }
        if averaged is None or len(counting) <= 1:
            return averaged, metrics
        return self._matched(counting), metrics

    def _matched(self, replies: Mapping[str, RecordDict]) -> ArrayRecord:
        """Return the matched average of some nodes' replies."""
        merge = api.match(
            {name: _arrays_of(content).to_torch_state_dict() for name, content in replies.items()},
            self._options,
            plan=self._plan,
            client_weight={name: self._samples(content) for name, content in replies.items()},
        )
        for warning in merge.warnings:
            log(WARNING, "%s", warning)
        return ArrayRecord(merge.state_dict())

    def _samples(self, content: RecordDict) -> float:
        [metrics] = content.metric_records.values()
        return float(cast(float, metrics[self.weighted_by_key]))


def _arrays_of(content: RecordDict) -> ArrayRecord:
    [arrays] = content.array_records.values()  # FedAvg refuses replies with another number
    return arrays


def _is_finite(reply: Message) -> bool:
    """Return whether a node's arrays are finite; where they are not, say that it is left out."""
    values = [a.numpy() for r in reply.content.array_records.values() for a in r.values()]
    if all(np.isfinite(array).all() for array in values if array.dtype.kind == "f"):
        return True
    log(WARNING, "node %s is left out: NaN or Inf in its arrays", reply.metadata.src_node_id)
    return False
