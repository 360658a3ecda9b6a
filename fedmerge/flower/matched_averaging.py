"""A strategy of Flower's that matches units before it averages them, once per round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedmerge.architecture.model_code import Model
from fedmerge.frameworks import MatchedAverage, State, not_finite
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
        self._average = MatchedAverage(model, plan, match)

    def summary(self) -> None:
        """Log what the strategy does."""
        super().summary()
        log(INFO, "\t└──> Units are matched before they are averaged")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure a round; a model that can't be planned is refused before anybody trains."""
        self._average.plan(arrays.to_torch_state_dict())
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the matched average of the replies, and the mean of their metrics."""
        usable = [reply for reply in replies if reply.has_error() or _is_finite(reply)]
        averaged, metrics = super().aggregate_train(server_round, usable)  # refuses odd replies
        contents = {
            f"node {reply.metadata.src_node_id}": reply.content
            for reply in sorted(usable, key=lambda reply: reply.metadata.src_node_id)
            if not reply.has_error() and self._samples(reply.content) > 0
        }
        if averaged is None or len(contents) <= 1:
            return averaged, metrics
        merge = self._average.merge(
            {name: _state_of(content) for name, content in contents.items()},
            {name: self._samples(content) for name, content in contents.items()},
        )
        for warning in merge.warnings:
            log(WARNING, "%s", warning)
        return ArrayRecord(merge.state_dict()), metrics

    def _samples(self, content: RecordDict) -> float:
        [metrics] = content.metric_records.values()
        return float(cast(float, metrics[self.weighted_by_key]))


def _state_of(content: RecordDict) -> State:
    [arrays] = content.array_records.values()
    return arrays.to_torch_state_dict()


def _is_finite(reply: Message) -> bool:
    """Return whether a node's arrays are finite; where they are not, say that it is left out."""
    wrong = not_finite(_state_of(reply.content))
    if wrong:
        node = reply.metadata.src_node_id
        log(WARNING, "node %s is left out: NaN or Inf in its '%s'", node, wrong[0])
    return not wrong
