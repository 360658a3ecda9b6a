"""The whole of FedMA over the sites of an NVFLARE job, to the bytes of the other engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from fedmerge.engines import MESSAGE, NvflareEngine, Site, Task, answer_model
from fedmerge.training import LOOK, ClientWork
from fedmerge.values import Array
from tests.nvflare import ThreadJob, needs_nvflare, submitting
from tests.permuted_nets import trained
from tests.sites import NAMES, OPTIONS, Net, data

pytestmark = [
    needs_nvflare,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),  # NVFLARE's own
]


ASKED = ClientWork(  # by a server that is hostile
    client="north",
    builder="os:getcwd",
    shard="/etc/passwd",
    arguments={"factory": "evil.py:Net", "arguments": {"x": 1}, "aliases": {}},
    task="evil.py:task",
)
Load = Callable[[str], tuple[Array, Array]]


def answering(load: Load) -> Callable[[str, Any], Any]:
    from fedmerge.frameworks import WORKS, work_on_own

    sites = {n: Site(WORKS, work_on_own(partial(load, n), Net, "classification")) for n in NAMES}
    return lambda name, params: {MESSAGE: answer_model(params, sites[name])}


def job(
    folder: Path, *, load: Load = data, persistor: Any = None, policy: Any = None, **options: Any
) -> ThreadJob:
    from nvflare.apis.fl_constant import FLContextKey

    from fedmerge.nvflare import FedMA, GlobalModelPersistor

    controller = FedMA("the_net:Net", {**OPTIONS, **options}, policy, len(NAMES))
    made = ThreadJob(controller, NAMES, submitting(answering(load)))
    made.components["persistor"] = persistor or GlobalModelPersistor()
    made.context.set_prop(FLContextKey.APP_ROOT, str(folder))
    return made


@pytest.fixture(autouse=True)
def _the_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server import the model, as from the folder of its app."""
    module = ModuleType("the_net")
    module.__dict__.update(Net=Net, __file__=__file__)
    monkeypatch.setitem(sys.modules, "the_net", module)


def run(made: ThreadJob) -> None:
    with made.running():
        made.controller.run()


def test_the_saved_model_is_that_of_the_local_engine_bit_by_bit(tmp_path: Path) -> None:
    run(job(tmp_path))
    own = {name: data(name) for name in NAMES}
    local, saved = tmp_path / "local.pt", tmp_path / "global.pt"
    given: dict[str, Any] = {"model": "the_net:Net", "device": "cpu", "output": local}
    retrained = fedmerge.retrain([], own, **given, **OPTIONS)
    assert saved.read_bytes() == local.read_bytes()
    for end in (".pt", ".pt.json"):
        assert saved.with_suffix(end).read_bytes() == local.with_suffix(end).read_bytes()
    assert retrained.growth > 1  # wider than the model that the job began with
    assert fedmerge.load_model(Net, saved)[0].out_features == retrained.widths["0"]
    run(job(tmp_path, seed=1))  # the negative control
    assert saved.read_bytes() != local.read_bytes()


def test_a_site_that_fails_is_left_out_of_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def load(name: str) -> tuple[Array, Array]:
        if name == "south":
            raise FileNotFoundError("no disk today")
        return data(name)

    run(job(tmp_path, load=load, passes=1, policy={"min_clients": 2}))
    record = json.loads((tmp_path / "global.pt.json").read_text())
    missing = [entry["missing"] for entry in record["retrain"]["rounds"]]
    assert missing == [{"south": "app"}] * 3
    with pytest.raises(fedmerge.TrainingError, match="2 of 3 clients delivered, 3 are needed"):
        run(job(tmp_path, load=load, passes=1, policy={"min_clients": 3}))
    assert "south (app): `load_data` fails: FileNotFoundError: no disk today" in caplog.text


def test_a_persistor_that_would_lose_the_result_is_refused_beforehand(tmp_path: Path) -> None:
    from nvflare.app_common.abstract.model import make_model_learnable
    from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor

    persistor = PTFileModelPersistor(model=Net())
    made = job(tmp_path, persistor=persistor)
    with pytest.raises(fedmerge.UsageError, match="persistor is PTFileModelPersistor, expected"):
        run(made)
    assert made.tasks == []
    wider = nn.Sequential(nn.Linear(6, 11)).state_dict()
    grown = {name: tensor.numpy() for name, tensor in wider.items()}
    with pytest.raises(ValueError, match="shape mismatch"):  # why
        persistor.save_model(make_model_learnable(grown, {}), made.context)


def test_the_persistor_keeps_any_widths_and_begins_with_a_file(tmp_path: Path) -> None:
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.app_common.abstract.model import make_model_learnable

    from fedmerge.nvflare import GlobalModelPersistor

    context = FLContext()
    context.set_prop(FLContextKey.APP_ROOT, str(tmp_path))
    assert GlobalModelPersistor().load_model(context).is_empty()
    torch.save(Net().state_dict(), tmp_path / "initial.pt")
    persistor = GlobalModelPersistor("saved.safetensors", str(tmp_path / "initial.pt"))
    assert persistor.load_model(context)["weights"]["0.weight"].shape == (10, 6)
    arrays = {name: tensor.numpy() for name, tensor in trained().items()}
    persistor.save_model(make_model_learnable(arrays, {}), context)
    found = persistor.load_model(context)["weights"]
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def test_a_server_names_no_code_and_no_files_of_a_site(tmp_path: Path) -> None:
    """What a hostile server puts into a task is replaced by the site's own."""
    with job(tmp_path).running() as made:
        engine = NvflareEngine(made.controller)
        [outcome] = engine.run([Task("t", "north", LOOK, {}, ASKED.to_json())], timeout=60)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.values["samples"] == 24


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_script_answers_in_the_kind_that_it_received(
    is_tensor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nvflare.client
    from nvflare.app_common.abstract.fl_model import FLModel

    from fedmerge.nvflare import serve

    kind = torch.Tensor if is_tensor else np.ndarray
    sent: list[Any] = []

    def answer(name: str, params: Any) -> Any:
        given = {key: torch.as_tensor(value) for key, value in params.items()}
        sent.clear()
        fakes = {
            "init": lambda: None,
            "get_site_name": lambda: name,
            "is_running": lambda: not sent,
            "receive": lambda: FLModel(params=given if is_tensor else params),
            "send": lambda model: sent.append(model.params),
        }
        for function, fake in fakes.items():
            monkeypatch.setattr(nvflare.client, function, fake)
        serve(data, Net, device="cpu")
        assert isinstance(sent[0][MESSAGE], kind)
        return sent[0]

    made = job(tmp_path)
    made.submit = submitting(answer)
    with made.running():
        engine = NvflareEngine(made.controller)
        for function, status in [(LOOK, "ok"), ("os:getcwd", "app")]:
            [outcome] = engine.run([Task("t", "west", function, {}, ASKED.to_json())], timeout=60)
            assert outcome.status == status
            assert outcome.values.get("samples") == (24 if status == "ok" else None)


def test_a_recipe_says_how_its_parts_are_built_and_copies_no_source_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedmerge.nvflare import FedMARecipe

    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "client.py"):
        Path(name).write_text("import fedmerge.nvflare\n")
    options, policy = {"passes": 2}, {"timeout": 60.0}
    recipe = FedMARecipe(
        name="job", model="net.py:Net", train_script="client.py", options=options, policy=policy
    )
    recipe.export(str(tmp_path / "jobs"))
    [config] = (tmp_path / "jobs").rglob("config_fed_server.json")
    [workflow] = json.loads(config.read_text())["workflows"]
    assert workflow["path"] == "fedmerge.nvflare.rounds_of_job.FedMA"
    assert workflow["args"] == {"model": "net:Net", "options": options, "policy": policy}
    brought = sorted(path.name for path in (tmp_path / "jobs").rglob("*.py"))
    assert brought == ["client.py", "net.py"]
