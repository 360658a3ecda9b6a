"""The ClientApp of a site: its own data, model and task, and the work that a server may ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from fedmerge.engines import answer_tasks
from fedmerge.engines.engine import CallWork
from fedmerge.frameworks import WORKS, work_on_own
from fedmerge.training import choose_devices
from fedmerge.training.samples import Data
from fedmerge.training.tasks import LearningTask

LoadData: TypeAlias = Callable[[Context], Data]


def client_app(
    load_data: LoadData,
    build_model: Callable[[], nn.Module],
    task: str | LearningTask = "classification",
    *,
    device: str = "auto",
    threads: int = 1,
) -> ClientApp:
    """Return the ClientApp that `fedmerge.flower.FedMA` works with.

    `load_data(context)` returns the node's samples and targets: a data set, a loader, a pair of
    arrays or tensors, or a path. The server names no code, no file and no other client: all of
    these are the site's own, and it does nothing but look at its data, train, and measure.
    """
    app = ClientApp()
    known: dict[int, CallWork] = {}  # by node: data are loaded once

    def caller_of(context: Context) -> CallWork:
        if context.node_id not in known:
            known[context.node_id] = work_on_own(lambda: load_data(context), build_model, task)
        return known[context.node_id]

    answer_tasks(app, WORKS, caller_of=caller_of, device=choose_devices(device)[0], threads=threads)
    return app
