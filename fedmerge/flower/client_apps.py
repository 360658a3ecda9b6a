"""The ClientApp of a site: its own data, model and task, and the work that a server may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from fedmerge.architecture.model_code import BUILDER
from fedmerge.engines import answer_tasks
from fedmerge.engines.engine import CallWork, Reply, call_work
from fedmerge.training import EVALUATE, LOOK, TRAIN, ClientWork, choose_devices
from fedmerge.training.samples import Data
from fedmerge.training.shards import shard_of
from fedmerge.training.tasks import LearningTask
from fedmerge.user_code import handing_over
from fedmerge.values.work import Arrays, JsonObject, Place

LoadData: TypeAlias = Callable[[Context], Data]
WORKS = (LOOK, TRAIN, EVALUATE)


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
    known: dict[int, Any] = {}  # node → its data, which are loaded once

    def caller_of(context: Context) -> CallWork:
        if context.node_id not in known:
            known[context.node_id] = shard_of(load_data(context), "load_data")
        data = known[context.node_id]
        return lambda function, arrays, settings, place: _run_on_own(
            {"shard": lambda client: (data.x[:], data.y), "model": build_model, "task": task},
            function,
            arrays,
            settings=settings,
            place=place,
        )

    answer_tasks(app, WORKS, caller_of=caller_of, device=choose_devices(device)[0], threads=threads)
    return app


def _run_on_own(
    own: Mapping[str, Any], function: str, arrays: Arrays, *, settings: JsonObject, place: Place
) -> Reply:
    """Do a server's work with the site's own data, model and task."""
    try:
        work = ClientWork.from_json(settings)
        aliases = dict(work.arguments["aliases"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Reply("app", message=f"a task that this version can't read ({error!r})")
    with handing_over() as hand_over:
        model = {"factory": hand_over(own["model"]), "arguments": {}, "aliases": aliases}
        task = own["task"] if isinstance(own["task"], str) else hand_over(own["task"])
        replaced = replace(
            work, builder=BUILDER, shard=hand_over(own["shard"]), arguments=model, task=task
        )
        return call_work(function, arrays, replaced.to_json(), place)
