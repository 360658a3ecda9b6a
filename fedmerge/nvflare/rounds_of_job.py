"""FedMA by rounds over the sites of an NVFLARE job: layer-wise, with growth and communication."""

from __future__ import annotations

import time
from collections.abc import Mapping
from logging import INFO
from typing import Any

from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from fedmerge.engines import NvflareEngine
from fedmerge.errors import TrainingError, UsageError
from fedmerge.frameworks import retrain_at_sites
from fedmerge.nvflare.persistor import GlobalModelPersistor
from fedmerge.values.option_fields import changed
from fedmerge.values.run_settings import RetryPolicy

WAIT = 1.0  # seconds between looks at which sites have come


class FedMA(ModelController):  # type: ignore[misc]  # NVFLARE has no types
    """Matched averaging layer by layer, as `fedmerge.retrain` runs it, over a job's sites.

    Their scripts call `fedmerge.nvflare.serve`. `model` is a reference that the server can import,
    such as "net:Net". `options` are the keywords of `fedmerge.retrain`, such as `{"epochs": 5,
    "passes": 2, "max_growth": 1.5}`; `policy` are those of `fedmerge.RetryPolicy`, for sites that
    fail: `{"timeout": 600, "retries": 2, "min_clients": 3}`. Rounds begin as soon as `min_clients`
    sites have come. The job's persistor is a `GlobalModelPersistor`, which says
    where the global model is written.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        policy: Mapping[str, Any] | None = None,
        min_clients: int = 2,
        persistor_id: str = "persistor",
    ) -> None:
        super().__init__(persistor_id=persistor_id)
        # By these names, jobs say how they were built.
        self.model, self.options, self.policy = model, dict(options or {}), dict(policy or {})
        self.min_clients = min_clients

    def run(self) -> None:
        """Run all rounds and save the global model, with its record."""
        policy = changed(RetryPolicy(), self.policy)
        own = {"output": self._persistor().path(self.fl_ctx), "force": True, "policy": policy}
        retrain_at_sites(
            None,
            lambda clients: NvflareEngine(self, clients),
            names=self._sites(),
            model=self.model,
            log=self._log_line,
            options={**own, **self.options},
        )
        self.event(AppEventType.AFTER_LEARNABLE_PERSIST)

    def _persistor(self) -> GlobalModelPersistor:
        """Return the job's persistor; one that would lose the result is refused beforehand."""
        if isinstance(self.persistor, GlobalModelPersistor):
            return self.persistor
        raise UsageError(
            f"the job's persistor is {type(self.persistor).__name__}, expected a "
            "GlobalModelPersistor: others refuse a model that has grown",
            'job.to_server(GlobalModelPersistor(), id="persistor")',
        )

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
