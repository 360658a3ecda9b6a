from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import fedmerge.engines.ray_engine as ray_flights
from fedmerge.engines import LocalEngine, Outcome, RayEngine, Share, Task, connect
from fedmerge.errors import UsageError
from fedmerge.federated import Running
from fedmerge.values import Array, JsonObject
from tests.clusters import STORE, Cluster, Node, cluster, needs_ray
from tests.unit.engines.conformance import CLIENTS, IsolatedConformance, run_one, task
from tests.unit.engines.test_processes import wait_until_dead
from tests.unit.engines.work import HERE, PATIENCE

pytestmark = [
    pytest.mark.slow,
    needs_ray,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Two nodes with one slot each, which this process has joined."""
    with cluster() as made, pytest.MonkeyPatch.context() as patch:
        made.add()
        made.add()
        for name, value in made.environment.items():
            patch.setenv(name, value)
        end = connect(made.address, cpus=0)
        yield made
        end()


@pytest.fixture
def engine(two_nodes: Cluster) -> Iterator[RayEngine]:
    engine = RayEngine(CLIENTS, address=two_nodes.address)
    yield engine
    engine.close()


class TestRayEngine(IsolatedConformance):
    width = 2
    killed = "its process died"  # Ray does not say by what


def nodes_alive() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]


def wait_for(happens: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not happens() and time.monotonic() < end:
        time.sleep(0.1)
    return happens()


@contextmanager
def third_node(
    nodes: Cluster, *, cpus: int = 1, gpus: int = 0, clients: Sequence[str] = ()
) -> Iterator[Node]:
    """Add a node for a while."""
    node = nodes.add(cpus=cpus, gpus=gpus, clients=clients)
    try:
        yield node
    finally:
        node.stop()
        nodes.nodes.remove(node)
    assert wait_for(lambda: nodes_alive() == len(nodes.nodes))


def outcomes_of(engine: RayEngine, tasks: Sequence[Task]) -> dict[str, Outcome]:
    return {outcome.client: outcome for outcome in engine.run(tasks, timeout=None)}


def test_each_client_gets_its_own_arrays_whose_shapes_change(engine: RayEngine) -> None:
    for width in (3, 1, 7):
        given: dict[str, dict[str, Array]] = {
            name: {"w": np.full((width, k + 1), k, np.float32), f"only-{name}": np.arange(k)}
            for k, name in enumerate(CLIENTS)
        }
        tasks = [Task(n, n, f"{HERE}:double", arrays, {"n": n}) for n, arrays in given.items()]
        found = outcomes_of(engine, tasks)
        for name, arrays in given.items():
            back = found[name].arrays
            assert {n: a.tolist() for n, a in back.items()} == {
                n: (a * 2).tolist() for n, a in arrays.items()
            }
            assert found[name].values == {"n": name}


def test_results_can_be_changed_and_inputs_are_left_alone(engine: RayEngine) -> None:
    given = Task("t", "a", f"{HERE}:echo", {"x": np.zeros(1_000_000)})
    back = run_one(engine, given).arrays["x"]
    back[0] = 1
    assert given.arrays["x"][0] == 0


def test_workers_have_the_clients_threads_and_our_folder(
    two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = RayEngine(CLIENTS, share=Share(1), threads=3)
    values = run_one(engine, task("where")).values
    assert values["folder"] == str(tmp_path)
    assert set(values["threads"].values()) == {"3"}


def test_tasks_that_run_side_by_side_are_on_both_nodes(
    two_nodes: Cluster, engine: RayEngine, tmp_path: Path
) -> None:
    raylets = {node.raylet for node in two_nodes.nodes}
    found = outcomes_of(
        engine, [task("where", number, folder=str(tmp_path)) for number in range(2)]
    )
    assert {outcome.values["parent"] for outcome in found.values()} == raylets
    assert len(raylets) == 2


def test_a_lost_node_loses_its_task_and_its_client(two_nodes: Cluster) -> None:
    with third_node(two_nodes, clients=["c"]) as node:
        engine = RayEngine(CLIENTS)
        assert sorted(client.name for client in engine.clients()) == list(CLIENTS)
        assert run_one(engine, task("where", 2)).values["parent"] == node.raylet
        tasks = [task("sleep", 2, seconds=600), task("sleep", 0, seconds=1), task("echo", 1)]
        found = {}
        for outcome in engine.run(tasks, timeout=None):
            found[outcome.client] = outcome
            if outcome.client == "b":
                node.kill()
        assert {name: outcome.status for name, outcome in found.items()} == {
            "a": "ok",
            "b": "ok",
            "c": "lost",
        }
        known = ("NodeDiedError", "WorkerCrashedError")
        causes = {ray_flights._CAUSES[name] for name in known}
        unplaced = "no node that is up can take it"  # it died before a process took the task
        assert found["c"].message in {*causes, unplaced}
        left = ["a", "b", "d"]
        assert wait_for(lambda: [client.name for client in engine.clients()] == left)
        late = run_one(engine, task("echo", 2))
        assert (late.status, late.message) == ("lost", unplaced)


def beside_of(one: JsonObject, values: Sequence[JsonObject]) -> list[JsonObject]:
    """Return what ran when this one began, itself too."""
    return [value for value in values if value["began"] <= one["began"] < value["ended"]]


def test_gpus_are_dealt_one_to_each_fresh_process(two_nodes: Cluster, tmp_path: Path) -> None:
    with third_node(two_nodes, cpus=4, gpus=2):
        engine = RayEngine(CLIENTS, share=Share(cpus=1, gpus=1), device="cuda")
        tasks = [task("hold_gpu", k, folder=str(tmp_path)) for k in range(4)]
        outcomes = list(engine.run(tasks, timeout=None))
    assert [(outcome.status, outcome.message) for outcome in outcomes] == [("ok", "")] * 4
    values = [outcome.values for outcome in outcomes]
    assert {value["gpu"] for value in values} == {"0", "1"}
    assert {value["device"] for value in values} == {"cuda"}
    assert len({value["pid"] for value in values}) == 4
    for value in values:
        beside = beside_of(value, values)
        assert len({v["gpu"] for v in beside}) == len(beside)
    assert max(len(beside_of(value, values)) for value in values) == 2


def test_shares_that_no_node_has_are_refused(two_nodes: Cluster) -> None:
    with pytest.raises(UsageError, match=r"no node of the cluster has 1 CPUs and 1 GPUs"):
        RayEngine(CLIENTS, share=Share(cpus=1, gpus=1))


def used_of_store() -> float:
    """Return the bytes in all object stores."""
    import ray

    free: float = ray.available_resources()["object_store_memory"]  # type: ignore[no-untyped-call]
    return 2 * STORE - free


def test_the_object_store_holds_the_tasks_in_hand_and_no_others(engine: RayEngine) -> None:
    large = 40_000_000

    def tasks() -> Iterator[Task]:
        for number in range(8):
            array = np.full(large, number, np.uint8)
            yield Task(f"{number}", CLIENTS[number % 4], f"{HERE}:echo", {"x": array})

    used = []
    for outcome in engine.run(tasks(), timeout=None):
        assert (outcome.status, outcome.nbytes) == ("ok", large)
        assert outcome.arrays["x"][0] == int(outcome.task)
        used.append(used_of_store())
    assert max(used) < 2 * 2 * large * 1.1  # two slots, each with an input and a result
    assert wait_for(lambda: used_of_store() < large / 2)


def test_work_that_is_stopped_leaves_no_process(engine: RayEngine, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    assert run_one(engine, task("linger", mark=str(mark)), timeout=4).status == "timeout"
    assert wait_until_dead(int(mark.read_text()))


def test_work_whose_outcome_nobody_wants_is_stopped(engine: RayEngine, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    outcomes = engine.run([task("linger", 0, mark=str(mark)), task("echo", 1)], timeout=None)
    assert next(outcomes).client == "b"
    assert wait_for(mark.exists)
    outcomes.close()  # type: ignore[attr-defined]
    assert wait_until_dead(int(mark.read_text()))


def test_the_death_of_a_process_is_not_printed_among_the_results(
    engine: RayEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_one(engine, task("die")).status == "lost"
    time.sleep(1.5)  # Ray tells it a little later
    assert capfd.readouterr().out == ""


def slow_import(folder: Path, seconds: float) -> Task:
    """Return a task whose module takes its time."""
    source = f"import time\ntime.sleep({seconds})\nfrom {HERE} import echo\n"
    (folder / "slow_to_import.py").write_text(source)
    return Task("t", "a", "slow_to_import:echo")


def test_imports_of_the_work_are_not_the_clients_time(
    two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    given = slow_import(tmp_path, 3)
    outcome = run_one(RayEngine(CLIENTS), given, timeout=2.5)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.seconds < 2.5


def test_imports_that_hang_lose_the_task(
    two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ray_flights, "START_LIMIT", 0.5)
    outcome = run_one(RayEngine(CLIENTS), slow_import(tmp_path, 600), timeout=None)
    assert (outcome.status, outcome.seconds) == ("lost", 0.0)
    assert "within 0.5 s" in outcome.message


def free_slots() -> float:
    """Return how many CPUs of the cluster nobody holds."""
    import ray

    return ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call,no-any-return]


def test_a_busy_cluster_is_waited_for_but_not_for_ever(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    others = [ray.remote(num_cpus=1)(lambda: time.sleep(600)).remote() for _ in range(2)]
    try:
        assert wait_for(lambda: free_slots() == 0)
        monkeypatch.setattr(ray_flights, "QUEUE_LIMIT", 2.5)
        outcome = run_one(engine, task("echo"), timeout=1.0)
        assert outcome.status == "lost"
        assert "within 2.5 s" in outcome.message
        monkeypatch.undo()
        ray.cancel(others.pop(), force=True)
        assert run_one(engine, task("echo")).status == "ok"
    finally:
        for other in others:
            ray.cancel(other, force=True)


def test_waiting_for_ones_own_tasks_is_no_reason_to_give_up(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    list(engine.run([task("echo", k) for k in range(4)], timeout=None))  # processes are there
    other = ray.remote(num_cpus=1)(lambda: time.sleep(600)).remote()  # one of the two slots
    try:
        assert wait_for(lambda: free_slots() == 1)
        monkeypatch.setattr(ray_flights, "QUEUE_LIMIT", 4.0)
        tasks = [task("sleep", 0, seconds=5.5), task("echo", 1)]
        assert [o.status for o in engine.run(tasks, timeout=None)] == ["ok", "ok"]
    finally:
        ray.cancel(other, force=True)


def test_nodes_are_looked_for_by_the_second_and_not_by_the_task(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[set[str]] = []

    def names() -> set[str]:
        looks.append(set(CLIENTS))
        return looks[-1]

    monkeypatch.setattr(engine, "_names", names)
    began = time.monotonic()
    assert len(list(engine.run([task("echo", k) for k in range(100)], timeout=None))) == 100
    assert 1 <= len(looks) <= 1 + (time.monotonic() - began) / ray_flights.LOOK


def test_a_full_object_store_loses_the_task(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def refuse(value: object) -> object:
        raise ray.exceptions.OutOfDiskError

    with monkeypatch.context() as patch:
        patch.setattr(ray, "put", refuse)
        outcomes = outcomes_of(engine, [task("echo", number) for number in range(3)])
    assert {outcome.status for outcome in outcomes.values()} == {"lost"}
    assert len(outcomes) == 3
    assert run_one(engine, task("echo")).status == "ok"


def test_results_are_those_of_the_local_engine(engine: RayEngine) -> None:
    given = Task("t", "a", f"{HERE}:double", {"x": np.linspace(0, 1, 1001)}, {"k": [1, 2]})
    here, there = run_one(LocalEngine(CLIENTS), given), run_one(engine, given)
    assert here.arrays["x"].tobytes() == there.arrays["x"].tobytes()
    assert here.values == there.values


def test_an_engine_without_its_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="`engine=ray` needs Ray") as refused:
        Running(engine="ray")
    assert refused.value.hint == "pip install 'fedmerge[ray]'"
    Running(engine="processes")


@pytest.mark.parametrize(("before", "is_refused"), [("import ray", True), ("", False)])
def test_no_cluster_is_started_that_others_could_reach(before: str, is_refused: bool) -> None:
    code = f"""{before}
from fedmerge.engines import RayEngine, ray_cluster
ray_cluster._start = lambda cpus: exit("started")
RayEngine(["a"])
"""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)
    expected = "UsageError: Ray was imported before, and would start" if is_refused else "started"
    assert done.stderr.splitlines()[-1].rpartition("fedmerge.errors.")[2].startswith(expected)


def test_ray_is_imported_only_by_its_engine() -> None:
    code = "import sys, fedmerge.cli.retrain, fedmerge.engines as e; print('ray' in sys.modules); "
    code += "import ray; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
