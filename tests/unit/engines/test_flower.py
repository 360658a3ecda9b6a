"""The engine whose transport is Flower's grid."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import fedmerge.engines.flower_engine as flower
from fedmerge.engines import FlowerEngine, Task, answer_tasks
from fedmerge.errors import TrainingError
from fedmerge.training import TRAIN
from tests.flower import ThreadGrid, needs_flower
from tests.unit.engines import work
from tests.unit.engines.conformance import CLIENTS, Conformance, run_one, task
from tests.unit.engines.work import HERE

pytestmark = needs_flower

NODES = {100 + place: {"client": client} for place, client in enumerate(CLIENTS)}
WORKS = {TRAIN, f"{HERE}:nowhere", *(f"{HERE}:{name}" for name in vars(work))}


def app(works: Collection[str] = WORKS, **options: Any) -> Any:
    from flwr.clientapp import ClientApp

    made = ClientApp()
    answer_tasks(made, works, **options)
    return made


@pytest.fixture
def grid() -> ThreadGrid:
    return ThreadGrid(app(), NODES)


@pytest.fixture
def engine(grid: ThreadGrid) -> Iterator[FlowerEngine]:
    made = FlowerEngine(grid, CLIENTS)  # type: ignore[arg-type]
    yield made
    made.close()


class TestFlowerEngine(Conformance):
    width = 4


def test_nodes_say_which_client_they_are() -> None:
    nodes: Mapping[int, Mapping[str, Any]] = {5: {"partition-id": 1}, 9: {"partition-id": 0}}
    engine = FlowerEngine(ThreadGrid(app(), nodes))  # type: ignore[arg-type]
    assert [(c.name, c.where) for c in engine.clients()] == [
        ("client-1", "Flower's node 9"),
        ("client-2", "Flower's node 5"),
    ]


def test_every_node_gets_its_own_clients_task(grid: ThreadGrid, engine: FlowerEngine) -> None:
    engine.clients()  # asks nodes for their names
    before = len(grid.asked)
    arrays = {client: np.full(3, place) for place, client in enumerate(CLIENTS)}
    tasks = [Task(c, c, f"{HERE}:echo", {"x": array}, {}) for c, array in arrays.items()]
    outcomes = {o.client: o.arrays["x"].tolist() for o in engine.run(tasks, timeout=None)}
    assert outcomes == {client: array.tolist() for client, array in arrays.items()}
    assert sorted(grid.asked[before:]) == sorted(NODES)


def test_a_node_without_a_name_is_no_client() -> None:
    grid = ThreadGrid(app(), {1: {}, 2: {"client": "b"}})
    assert [c.name for c in FlowerEngine(grid).clients()] == ["b"]  # type: ignore[arg-type]


def test_two_nodes_of_one_name_are_refused() -> None:
    grid = ThreadGrid(app(), {1: {"client": "b"}, 2: {"client": "b"}})
    with pytest.raises(TrainingError, match="two of Flower's nodes say that they are client 'b'"):
        FlowerEngine(grid)  # type: ignore[arg-type]


def test_a_node_that_leaves_is_lost_and_may_come_back(
    grid: ThreadGrid, engine: FlowerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "LOOK_AT_NODES", 0.0)
    outcomes = engine.run([task("sleep", 1, seconds=600), task("echo", 2)], timeout=None)
    assert next(outcomes).status == "ok"
    grid.leave(101)
    lost = next(outcomes)
    assert (lost.client, lost.status) == ("b", "lost")
    assert lost.message == "its node left Flower's federation"
    assert [c.name for c in engine.clients()] == ["a", "c", "d"]
    grid.join(205, {"client": "b"})
    assert [c.name for c in engine.clients()] == list(CLIENTS)
    assert run_one(engine, task("echo", 1)).status == "ok"


def test_a_client_that_nobody_is_is_lost(engine: FlowerEngine, grid: ThreadGrid) -> None:
    outcome = run_one(engine, Task("t", "z", f"{HERE}:echo", {}, {}))
    assert (outcome.status, outcome.client) == ("lost", "z")


def test_work_that_hangs_is_given_up(engine: FlowerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "GRACE", 0.0)
    tasks = [task("sleep", 0, seconds=600), task("echo", 1)]
    outcomes = {o.client: o for o in engine.run(tasks, timeout=1.0)}
    assert outcomes["a"].status == "timeout"
    assert outcomes["a"].message == "did not answer within 1 s"
    assert outcomes["b"].status == "ok"


def test_a_client_does_no_other_work_than_it_knows(grid: ThreadGrid) -> None:
    """The server names a function; what is not on the client's list is not even imported."""
    asked = Task("t", "a", "os:getcwd", {}, {})
    outcome = run_one(FlowerEngine(ThreadGrid(app({TRAIN}), NODES)), asked)  # type: ignore[arg-type]
    assert outcome.status == "app"
    assert outcome.message == "the server asks for 'os:getcwd', which this client does not do"


def test_a_site_says_where_it_computes() -> None:
    grid = ThreadGrid(app(device="cuda:1", threads=7), NODES)
    values = run_one(FlowerEngine(grid), task("describe"), timeout=5).values  # type: ignore[arg-type]
    assert (values["device"], values["threads"], values["timeout"]) == ("cuda:1", 7, 5)


def test_an_app_that_raises_is_that_clients_failure() -> None:
    def broken(*given: object) -> Any:
        raise ZeroDivisionError("no data today")

    grid = ThreadGrid(app(caller_of=lambda context: broken), NODES)
    outcome = run_one(FlowerEngine(grid), task("echo"))  # type: ignore[arg-type]
    assert outcome.status == "app"
    assert "no data today" in outcome.message


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("{", "truncated"),
        ('{"status": "fine"}', "Invalid enum value 'fine'"),
        ('{"status": "ok", "values": 3}', "Expected `object`"),
        ("[" * 100_000, "can't read"),
        (
            '{"status": "ok", "values": {}, "message": "", "hint": "", "details": "", '
            '"seconds": "long"}',
            "Expected `float`",
        ),
    ],
)
def test_a_reply_that_is_none_is_that_clients_failure(said: str, reason: str) -> None:
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    hostile = ClientApp()
    answer_tasks(hostile, ())
    hostile._registered_funcs.pop("train.fedmerge")

    @hostile.train("fedmerge")
    def work(message: Any, context: Any) -> Message:
        content = RecordDict({"arrays": ArrayRecord({}), "said": ConfigRecord({"json": said})})
        return Message(content, reply_to=message)

    outcome = run_one(FlowerEngine(ThreadGrid(hostile, NODES)), task("echo"))  # type: ignore[arg-type]
    assert outcome.status == "app"
    assert "fedmerge can't read" in outcome.message
    assert reason in outcome.message
