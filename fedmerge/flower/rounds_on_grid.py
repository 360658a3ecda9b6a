"""FedMA by rounds over Flower's nodes: layer-wise, with growth and with communication."""

from __future__ import annotations

import time
from collections.abc import Mapping
from logging import INFO
from typing import Any

from flwr.common import log
from flwr.serverapp import Grid

from fedmerge.architecture.model_code import Model
from fedmerge.engines import FlowerEngine
from fedmerge.federated.retraining import Retrained
from fedmerge.frameworks import retrain_at_sites

WAIT = 1.0  # seconds between looks at which nodes have come


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
        return retrain_at_sites(
            clients,
            lambda names: FlowerEngine(grid, names),
            names=[client.name for client in engine.clients()],
            model=self._model,
            log=lambda level, line: log(level, "%s", line),
            options=self._options,
        )

    def _engine_of_all(self, grid: Grid) -> FlowerEngine:
        """Return the engine once enough nodes have come."""
        while len(nodes := list(grid.get_node_ids())) < self._least:
            log(INFO, "Waiting for nodes: %d of %d have come", len(nodes), self._least)
            time.sleep(WAIT)
        return FlowerEngine(grid)
