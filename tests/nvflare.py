"""A job of NVFLARE's whose sites are threads of this process: its own controller, no network."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

needs_nvflare = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None,
    reason="NVFLARE is not installed: pip install 'fedmerge[nvflare]'",
)
LOOK = 0.01  # seconds between looks for a task
Submit = Callable[[str, Any], Any]  # from a site's name and a task's data to its result


class ThreadJob:
    """NVFLARE's server around a controller; sites fetch tasks and submit what `submit` returns."""

    def __init__(self, controller: Any, sites: Iterable[str], submit: Submit) -> None:
        from nvflare.apis.client import Client
        from nvflare.apis.fl_constant import FLContextKey
        from nvflare.apis.fl_context import FLContextManager
        from nvflare.apis.impl.wf_comm_server import WFCommServer
        from nvflare.apis.server_engine_spec import ServerEngineSpec
        from nvflare.apis.signal import Signal

        self.controller, self.submit = controller, submit
        self.sites = {name: Client(name, name) for name in sites}
        self.tasks: list[tuple[str, str]] = []  # sites and names of tasks, as they were fetched
        self.components: dict[str, Any] = {}
        engine = Mock(spec=ServerEngineSpec)
        meta = {FLContextKey.JOB_META: {"job_id": "job", "name": "job", "min_clients": 1}}
        manager = FLContextManager(engine, "server", "job", private_stickers=meta)
        engine.new_context = manager.new_context
        engine.get_clients = lambda: list(self.sites.values())
        engine.get_component = self.components.get
        engine.validate_targets = lambda names: ([self.sites[n] for n in names], [])
        self._server = WFCommServer(task_check_period=LOOK)
        controller.set_communicator(self._server)
        self._server.task_check_period = self._server._task_check_period = LOOK
        self.context = manager.new_context()
        controller.fl_ctx, controller.abort_signal = self.context, Signal()
        self._manager, self._ends = manager, threading.Event()

    @contextmanager
    def running(self) -> Iterator[ThreadJob]:
        """Let sites work, and the server watch tasks, for a while."""
        self.controller.initialize(self.context)
        self._server.initialize_run(self.context)
        for name in self.sites:
            threading.Thread(target=self._work, args=(name,), daemon=True).start()
        try:
            yield self
        finally:
            self._ends.set()
            self._server._all_done = True

    def leave(self, name: str) -> None:
        """Let NVFLARE deem a site disconnected; what it submits is dropped."""
        self._server.process_dead_client_report(name, self._manager.new_context())
        self._server._dead_clients[name].disconnect_time = time.time()

    def come_back(self, name: str) -> None:
        """Let NVFLARE hear of a site again."""
        self._server.client_is_active(name, "it is back", self._manager.new_context())

    def _work(self, name: str) -> None:
        while not self._ends.is_set():
            context = self._manager.new_context()
            site = self.sites[name]
            task, number, data = self._server.process_task_request(site, context)
            if not number:
                time.sleep(LOOK)
                continue
            self.tasks.append((name, task))
            result = self.submit(name, data)
            context = self._manager.new_context()
            if not self._server.get_client_disconnect_time(name):
                self._server.process_submission(site, task, number, result, context)


def submitting(answer: Callable[[str, Any], Any]) -> Submit:
    """Return how a site submits that answers a model's parameters by others."""

    def submit(name: str, data: Any) -> Any:
        from nvflare.apis.fl_constant import ReturnCode
        from nvflare.apis.shareable import make_reply
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.app_common.utils.fl_model_utils import FLModelUtils

        try:
            params = answer(name, FLModelUtils.from_shareable(data).params)
        except Exception:  # as NVFLARE's executors
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return FLModelUtils.to_shareable(FLModel(params=params))

    return submit
