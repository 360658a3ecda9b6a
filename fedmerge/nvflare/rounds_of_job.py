"""FedMA by rounds over the sites of an NVFLARE job: layer-wise, with growth and communication."""

from __future__ import annotations

import time
from collections.abc import Mapping
from logging import INFO
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from fedmerge.engines import NvflareEngine
from fedmerge.errors import TrainingError
from fedmerge.frameworks import retrain_at_sites
from fedmerge.nvflare.persistor import GlobalModelPersistor

WAIT = 1.0  # seconds between looks at which sites have come


class FedMA(ModelController):  # type: ignore[misc]  # NVFLARE has no types
    """Matched averaging layer by layer, as `fedmerge.retrain` runs it, over a job's sites.

    Their scripts call `fedmerge.nvflare.serve`. `model` is a reference that the server can import,
    such as "net:Net". `options` are the keywords of `fedmerge.retrain`, such as `{"epochs": 5,
    "passes": 2, "max_growth": 1.5}`. The global model goes to the persistor.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        min_clients: int = 2,
        persistor_id: str = "persistor",
    ) -> None:
        super().__init__(persistor_id=persistor_id)
        # By these names, jobs say how they were built.
        self.model, self.options, self.min_clients = model, dict(options or {}), min_clients

    def run(self) -> None:
        """Run all rounds and save the global model, with its record."""
        names = self._sites()
        persistor = self.persistor
        options = dict(self.options)
        is_ours = isinstance(persistor, GlobalModelPersistor)
        if is_ours:
            options = {"output": persistor.path(self.fl_ctx), "force": True} | options
        retrained = retrain_at_sites(
            None,
            lambda clients: NvflareEngine(self, clients),
            names=names,
            model=self.model,
            log=self._log_line,
            options=options,
        )
        if is_ours:  # it is written already, with its record
            self.event(AppEventType.AFTER_LEARNABLE_PERSIST)
        else:
            self.save_model(FLModel(params=retrained.state_dict()))

    def _sites(self) -> list[str]:
        """Return the sites once enough of them have come."""
        while (
            len(names := [site.name for site in NvflareEngine(self).clients()]) < self.min_clients
        ):
            if self.abort_signal.triggered:
                raise TrainingError("NVFLARE's job was aborted")
            self.info(f"Waiting for sites: {len(names)} of {self.min_clients} have come")
            time.sleep(WAIT)
        return names

    def _log_line(self, level: int, line: str) -> None:
        (self.info if level == INFO else self.warning)(line)
