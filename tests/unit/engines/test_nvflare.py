"""The engine whose transport is the controller of an NVFLARE job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fedmerge.engines.nvflare_engine as nvflare
from fedmerge.engines import MESSAGE, NvflareEngine, Site, Task, answer_model
from fedmerge.errors import TrainingError
from fedmerge.training import TRAIN
from fedmerge.values import Array
from tests.nvflare import ThreadJob, needs_nvflare, submitting
from tests.unit.engines import work
from tests.unit.engines.conformance import CLIENTS, Conformance, run_one, task
from tests.unit.engines.work import HERE

pytestmark = [
    needs_nvflare,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),  # NVFLARE's own
]

WORKS = {TRAIN, f"{HERE}:nowhere", *(f"{HERE}:{name}" for name in vars(work))}
Answer = Callable[[str, Any], Any]


def answering(site: Site) -> Answer:
    return lambda name, params: {MESSAGE: answer_model(params, site)}


def job(answer: Answer | None = None) -> ThreadJob:
    from nvflare.app_common.workflows.model_controller import ModelController

    class Controller(ModelController):  # type: ignore[misc]  # NVFLARE has no types
        def run(self) -> None:
            raise NotImplementedError

    return ThreadJob(Controller(), CLIENTS, submitting(answer or answering(Site(WORKS))))


@pytest.fixture
def sites() -> Iterator[ThreadJob]:
    with job().running() as running:
        yield running


@pytest.fixture
def engine(sites: ThreadJob) -> NvflareEngine:
    return NvflareEngine(sites.controller, CLIENTS)


def outcome_of(answer: Answer, one: Task | None = None, **limits: Any) -> Any:
    with job(answer).running() as running:
        return run_one(NvflareEngine(running.controller), one or task("echo"), **limits)


class TestNvflareEngine(Conformance):
    width = 4


def test_sites_are_clients_by_their_names(sites: ThreadJob) -> None:
    engine = NvflareEngine(sites.controller)
    assert [(c.name, c.where) for c in engine.clients()][:2] == [
        ("a", "NVFLARE's site a"),
        ("b", "NVFLARE's site b"),
    ]


def test_every_site_gets_its_own_clients_task(sites: ThreadJob, engine: NvflareEngine) -> None:
    arrays = {client: np.full(3, place) for place, client in enumerate(CLIENTS)}
    tasks = [Task(c, c, f"{HERE}:echo", {"x": array}, {}) for c, array in arrays.items()]
    outcomes = {o.client: o.arrays["x"].tolist() for o in engine.run(tasks, timeout=None)}
    assert outcomes == {client: array.tolist() for client, array in arrays.items()}
    assert sorted(sites.tasks) == [(client, "train") for client in CLIENTS]


def test_a_site_that_leaves_is_lost_and_may_come_back(
    sites: ThreadJob, engine: NvflareEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvflare.fuel.utils.config_service import ConfigService

    monkeypatch.setattr(ConfigService, "get_float_var", lambda *given, **named: 0.0)  # no grace
    outcomes = engine.run([task("sleep", 1, seconds=2), task("echo", 2)], timeout=None)
    assert next(outcomes).status == "ok"
    sites.leave("b")
    lost = next(outcomes)
    assert (lost.client, lost.status) == ("b", "lost")
    assert lost.message == "its site left NVFLARE's job"
    assert [c.name for c in engine.clients()] == ["a", "c", "d"]
    assert run_one(engine, task("echo", 1)).status == "lost"
    sites.come_back("b")
    assert [c.name for c in engine.clients()] == list(CLIENTS)
    assert run_one(engine, task("echo", 1)).status == "ok"


def test_a_client_that_nobody_is_is_lost(engine: NvflareEngine) -> None:
    outcome = run_one(engine, Task("t", "z", f"{HERE}:echo", {}, {}))
    assert (outcome.status, outcome.client) == ("lost", "z")


def test_work_that_hangs_is_given_up(
    engine: NvflareEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvflare, "GRACE", 0.0)
    tasks = [task("sleep", 0, seconds=600), task("echo", 1)]
    outcomes = {o.client: o for o in engine.run(tasks, timeout=1.0)}
    assert outcomes["a"].status == "timeout"
    assert outcomes["a"].message == "did not answer within 1 s"
    assert outcomes["b"].status == "ok"


def test_a_job_that_is_aborted_ends_the_run(sites: ThreadJob, engine: NvflareEngine) -> None:
    outcomes = engine.run([task("sleep", 0, seconds=600), task("echo", 1)], timeout=None)
    assert next(outcomes).status == "ok"
    sites.controller.abort_signal.trigger(True)
    with pytest.raises(TrainingError, match="NVFLARE's job was aborted"):
        next(outcomes)


def test_a_client_does_no_other_work_than_it_knows() -> None:
    """The server names a function; what is not on the client's list is not even imported."""
    asked = Task("t", "a", "os:getcwd", {}, {})
    outcome = outcome_of(answering(Site({TRAIN})), asked)
    assert outcome.status == "app"
    assert outcome.message == "the server asks for 'os:getcwd', which this client does not do"


def test_a_site_says_where_it_computes() -> None:
    site = Site(WORKS, device="cuda:1", threads=7)
    values = outcome_of(answering(site), task("describe"), timeout=5).values
    assert (values["device"], values["threads"], values["timeout"]) == ("cuda:1", 7, 5)


def test_a_script_that_raises_is_that_clients_failure() -> None:
    def broken(name: str, params: Any) -> Any:
        raise ZeroDivisionError

    outcome = outcome_of(broken)
    assert outcome.status == "app"
    assert outcome.message == "NVFLARE says EXECUTION_EXCEPTION; the site's own log says why"


def test_parameters_may_be_tensors_on_the_way() -> None:
    """As NVFLARE converts them for clients that use PyTorch."""
    import torch

    def answer(name: str, params: Any) -> Any:
        tensors = {key: torch.as_tensor(value) for key, value in params.items()}
        return {MESSAGE: torch.as_tensor(answer_model(tensors, Site(WORKS)))}

    given: dict[str, Array] = {"x": np.arange(3, dtype=np.float16), "none": np.empty((0, 2))}
    outcome = outcome_of(answer, Task("t", "a", f"{HERE}:echo", given, {}))
    assert outcome.arrays["x"].tobytes() == given["x"].tobytes()
    assert outcome.arrays["none"].shape == (0, 2)


def packed(text: bytes, rest: bytes = b"") -> Any:
    return np.frombuffer(len(text).to_bytes(8, "little") + text + rest, np.uint8)


HUGE = b'{"message": {}, "arrays": [["x", "<f8", [1000000000000]]]}'
SAID = b'{"message": {"said": "{\\"status\\": \\"fine\\"}"}, "arrays": []}'


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "its model has no 'fedmerge'"),
        ({"weight": np.zeros(3)}, "its model has no 'fedmerge'"),
        ({MESSAGE: np.zeros(100)}, "it is no line of bytes"),
        ({MESSAGE: np.full(100, 255, np.uint8)}, "bytes end before its header"),
        ({MESSAGE: "text"}, "can't read"),
        ({MESSAGE: packed(b"{")}, "truncated"),
        ({MESSAGE: packed(b'{"message": {}, "arrays": []}')}, "truncated"),
        ({MESSAGE: packed(SAID)}, "Invalid enum value 'fine'"),
        ({MESSAGE: packed(HUGE, bytes(8))}, "its bytes end inside 'x'"),
        ({MESSAGE: packed(HUGE.replace(b"<f8", b"O"))}, "'O' is no dtype of numbers"),
        ({MESSAGE: packed(HUGE.replace(b"<f8", b"2f8"))}, "is no dtype of numbers"),
        ({MESSAGE: packed(HUGE.replace(b"<f8", b"what"))}, "'what' is no dtype"),
        ({MESSAGE: packed(HUGE.replace(b"1000000000000", b"-1"))}, "Expected `int` >= 0"),
    ],
)
def test_a_reply_that_is_none_is_that_clients_failure(params: Any, reason: str) -> None:
    outcome = outcome_of(lambda name, given: params)
    assert outcome.status == "app"
    assert reason in outcome.message
