"""Recipes of NVFLARE jobs that use fedmerge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.fuel.utils.constants import FrameworkType
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe.spec import Recipe

from fedmerge.nvflare.persistor import GlobalModelPersistor
from fedmerge.nvflare.rounds_of_job import FedMA


class FedMARecipe(Recipe):  # type: ignore[misc]  # NVFLARE has no types
    """A job that runs FedMA over sites whose `train_script` calls `fedmerge.nvflare.serve`.

    `model` is a reference such as "net.py:Net"; that file goes to the server, and `train_script` to
    the sites, with what it imports. `options` and `policy` are those of `FedMA`. `file_name` is the
    global model's, in the server's app.
    """

    def __init__(
        self,
        *,
        name: str = "fedma",
        model: str,
        train_script: str,
        train_args: str = "",
        min_clients: int = 2,
        options: Mapping[str, Any] | None = None,
        policy: Mapping[str, Any] | None = None,
        file_name: str = "global.pt",
        launch_external_process: bool = False,
    ) -> None:
        job = FedJob(name=name, min_clients=min_clients)
        place, _, built = model.rpartition(":")
        if place.endswith(".py"):  # the server imports it by its name: it is in the app
            job.add_file_to_server(place)
            place = Path(place).stem
        job.to_server(FedMA(f"{place}:{built}", options, policy, min_clients))
        job.to_server(GlobalModelPersistor(file_name), id="persistor")
        runner = ScriptRunner(
            script=train_script,
            script_args=train_args,
            launch_external_process=launch_external_process,
            framework=FrameworkType.NUMPY,
        )
        job.to_clients(runner)
        super().__init__(job)
        use_installed(self)


def use_installed(job: FedJob | Recipe) -> None:
    """Let a job run the fedmerge that server and sites have installed.

    Otherwise NVFLARE copies its source into the job, without the files that say what is where, and
    imports fail. A job or recipe that takes a `MatchedAggregator` needs this, too.
    """
    own: FedJob = getattr(job, "_job", job)
    own.set_app_packages(sorted({*own.job.app_packages, "fedmerge"}))
