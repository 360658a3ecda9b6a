"""FedMA by rounds over Flower's nodes: layer-wise, with growth and with communication."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.common import log
from flwr.serverapp import Grid

from fedmerge import api
from fedmerge.architecture.model_code import Model
from fedmerge.engines import Engine, FlowerEngine
from fedmerge.federated.events import ClientFailed, Event, RoundDone, RunStarted
from fedmerge.federated.options import Running
from fedmerge.federated.retraining import Retrained
from fedmerge.values.wording import percent

WAIT = 1.0  # seconds between looks at which nodes have come
_AT_THE_NODE = ((), ())  # stands for a client's data, which only its node has


class FedMA:
    """Matched averaging layer by layer, as `fedmerge.retrain` runs it, over Flower's nodes.

    Nodes run a `fedmerge.flower.client_app`. `options` are the keywords of `fedmerge.retrain`,
    such as `epochs=5, passes=2, max_growth=1.5, output="global.pt", work_dir="state"`.
    """

    def __init__(self, model: Model, *, min_available_nodes: int = 2, **options: Any) -> None:
        self._model, self._least, self._options = model, min_available_nodes, options

    def start(self, grid: Grid, clients: Mapping[str, Any] | None = None) -> Retrained:
        """Run all rounds and return the global model, with its record.

        Without `clients` (checkpoints or state dicts by the names of nodes' clients) all begin
        with initial weights.
        """
        engine = self._engine_of_all(grid)
        names = [client.name for client in engine.clients()]
        return api.retrain(
            clients or [],
            dict.fromkeys(names, _AT_THE_NODE),
            model=self._model,
            running=OnGrid(grid=grid),
            hear=log_event,
            **self._options,
        )

    def _engine_of_all(self, grid: Grid) -> FlowerEngine:
        """Return the engine once enough nodes have come."""
        while len(nodes := list(grid.get_node_ids())) < self._least:
            log(INFO, "Waiting for nodes: %d of %d have come", len(nodes), self._least)
            time.sleep(WAIT)
        return FlowerEngine(grid)


@dataclass(frozen=True)
class OnGrid(Running):
    """A run whose clients are nodes of a grid; what is computed here runs on `device`."""

    grid: Any = None

    def start_engine(self, clients: Any) -> Engine:
        """Return the engine that runs these clients' work."""
        return FlowerEngine(self.grid, clients)


def log_event(event: Event) -> None:
    """Log what users of Flower want to know of a run."""
    if isinstance(event, RunStarted):
        log(INFO, "FedMA with %s: %d rounds", ", ".join(event.clients), event.rounds)
    elif isinstance(event, ClientFailed):
        log(WARNING, "%s (%s): %s", event.client, event.status, event.message)
    elif isinstance(event, RoundDone):
        loss = "" if event.loss is None else f", local loss {event.loss:.4f}"
        log(
            INFO, "[ROUND %d/%d] %s%s%s", event.round, event.rounds, event.layer, loss, _told(event)
        )


def _told(event: RoundDone) -> str:
    """Return how good the global model is, where that was measured."""
    metrics = {name: value for name, value in (event.metrics or {}).items() if value is not None}
    parts = [
        f"{name} {percent(value) if 'accuracy' in name else f'{value:.4f}'}"
        for name, value in metrics.items()
    ]
    return f"; global {', '.join(parts)}" if parts else ""
