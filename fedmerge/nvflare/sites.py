"""The script of a client: its own data, model and task, and the work that a server may ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nvflare.client
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from torch import nn

from fedmerge.engines import MESSAGE, Site, answer_model
from fedmerge.frameworks import WORKS, work_on_own
from fedmerge.training import choose_devices
from fedmerge.training.samples import Data
from fedmerge.training.tasks import LearningTask


def serve(
    load_data: Callable[[str], Data],
    build_model: Callable[[], nn.Module],
    task: str | LearningTask = "classification",
    *,
    device: str = "auto",
    threads: int = 1,
) -> None:
    """Do the work of `fedmerge.nvflare.FedMA` until the job is over: all of a client's script.

    `load_data(site)` returns the samples and targets of the site of this name: a data set, a
    loader, a pair of arrays or tensors, or a path. The server names no code, no file and no other
    client: all of these are the site's own, and it does nothing but look at its data, train, and
    measure.
    """
    nvflare.client.init()
    call = work_on_own(lambda: load_data(nvflare.client.get_site_name()), build_model, task)
    site = Site(WORKS, call, choose_devices(device)[0], threads)
    while nvflare.client.is_running():
        received = nvflare.client.receive()
        if received is not None:
            nvflare.client.send(FLModel(params=_answered(received.params, site)))


def _answered(params: Any, site: Site) -> dict[str, Any]:
    """Return the parameters of the answer, of the kind that was received: NVFLARE wants that."""
    answer = answer_model(params, site)
    is_tensor = isinstance(params[MESSAGE], torch.Tensor)
    return {MESSAGE: torch.from_numpy(answer) if is_tensor else answer}
