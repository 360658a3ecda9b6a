"""What fedmerge's parts of other federated-learning frameworks share.

Of servers: matched averages at constant width, and rounds over sites. Of sites: their own work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from logging import INFO, WARNING
from typing import Any, TypeAlias

import torch
from torch import nn

from fedmerge import api
from fedmerge.architecture.model_code import BUILDER, Model
from fedmerge.engines import Engine
from fedmerge.engines.engine import CallWork, Reply, call_work
from fedmerge.errors import TrainingCodeError, UsageError
from fedmerge.federated.events import ClientFailed, Event, RoundDone, RunStarted
from fedmerge.federated.options import Running
from fedmerge.federated.retraining import Retrained
from fedmerge.merging.options import MatchOptions
from fedmerge.merging.result import Merge
from fedmerge.training import EVALUATE, LOOK, TRAIN, ClientWork
from fedmerge.training.samples import Data
from fedmerge.training.shards import as_returned
from fedmerge.training.tasks import LearningTask
from fedmerge.user_code import handing_over, user_code
from fedmerge.values.option_fields import changed
from fedmerge.values.plans import Plan
from fedmerge.values.wording import percent
from fedmerge.values.work import Arrays, JsonObject, Place

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


@dataclass(frozen=True)
class AtSites(Running):
    """A run whose clients are sites of a framework; what is computed here runs on `device`."""

    engine_of: Callable[[Sequence[str]], Engine] | None = None

    def start_engine(self, clients: Sequence[str]) -> Engine:
        """Return the engine that runs these clients' work."""
        assert self.engine_of is not None
        return self.engine_of(clients)


Log: TypeAlias = Callable[[int, str], None]  # a line of a level of `logging`
_AT_THE_SITE = ((), ())  # stands for a client's data, which only its site has


def retrain_at_sites(
    clients: Mapping[str, Any] | None,
    engine_of: Callable[[Sequence[str]], Engine],
    *,
    names: Sequence[str],
    model: Model,
    log: Log,
    options: Mapping[str, Any],
) -> Retrained:
    """Run `fedmerge.retrain` over the sites that an engine reaches, and log what becomes of it."""
    return api.retrain(
        clients or [],
        dict.fromkeys(names, _AT_THE_SITE),
        model=model,
        running=AtSites(engine_of=engine_of),
        hear=lambda event: _log_event(event, log),
        **options,
    )


def _log_event(event: Event, log: Log) -> None:
    """Log what users of a framework want to know of a run."""
    if isinstance(event, RunStarted):
        log(INFO, f"FedMA with {', '.join(event.clients)}: {event.rounds} rounds")
    elif isinstance(event, ClientFailed):
        log(WARNING, f"{event.client} ({event.status}): {event.message}")
    elif isinstance(event, RoundDone):
        loss = "" if event.loss is None else f", local loss {event.loss:.4f}"
        place = f"[ROUND {event.round}/{event.rounds}]"
        log(INFO, f"{place} {event.layer}{loss}{_told(event)}")


def _told(event: RoundDone) -> str:
    """Return how good the global model is, where that was measured."""
    metrics = {name: value for name, value in (event.metrics or {}).items() if value is not None}
    parts = [
        f"{name} {percent(value) if 'accuracy' in name else f'{value:.4f}'}"
        for name, value in metrics.items()
    ]
    return f"; global {', '.join(parts)}" if parts else ""


WORKS = (LOOK, TRAIN, EVALUATE)  # all that a server may ask for


def work_on_own(
    load_data: Callable[[], Data], build_model: Callable[[], nn.Module], task: str | LearningTask
) -> CallWork:
    """Return how a site does a server's work: with its own data, model and task, whatever it says.

    The server names no code, no file and no other client. Data are loaded once.
    """

    @cache
    def own_data() -> object:
        with user_code("`load_data` fails", error=TrainingCodeError):
            loaded = load_data()
        return as_returned(loaded, "load_data")

    def call(function: str, arrays: Arrays, settings: JsonObject, place: Place) -> Reply:
        try:
            work = ClientWork.from_json(settings)
            aliases = dict(work.arguments["aliases"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return Reply("app", message=f"a task that this version can't read ({error!r})")
        with handing_over() as hand_over:
            replaced = replace(
                work,
                builder=BUILDER,
                shard=hand_over(lambda client: own_data()),
                arguments={"factory": hand_over(build_model), "arguments": {}, "aliases": aliases},
                task=task if isinstance(task, str) else hand_over(task),
            )
            return call_work(function, arrays, replaced.to_json(), place)

    return call
