import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedmerge.engines.processes as processes
from fedmerge.engines import (
    LocalEngine,
    ProcessEngine,
    RetryPolicy,
    Task,
    default_workers,
    run_step,
)
from fedmerge.errors import TrainingError
from fedmerge.process import python_command
from tests.unit.engines.conformance import CLIENTS, IsolatedConformance, run_one, task
from tests.unit.engines.work import HERE, PATIENCE

PARENT = f"""
import sys
sys.path[:] = {sys.path!r}
from fedmerge.engines import ProcessEngine, Task
engine = ProcessEngine(["a"], workers=1)
pid, = engine.run([Task("t", "a", "{HERE}:describe", {{}}, {{}})], timeout=None)
print(pid.values["pid"], flush=True)
list(engine.run([Task("t", "a", "{HERE}:sleep", {{}}, {{"seconds": 600}})], timeout=None))
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_dead(pid: int) -> bool:
    end = time.monotonic() + PATIENCE
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessEngine]:
    engine = ProcessEngine(CLIENTS, workers=2)
    yield engine
    engine.close()


class TestProcessEngine(IsolatedConformance):
    width = 2


def worker_pids(engine: ProcessEngine, count: int) -> list[int]:
    tasks = [task("describe", number) for number in range(count)]
    return [outcome.values["pid"] for outcome in engine.run(tasks, timeout=None)]


def test_workers_are_other_processes_and_are_used_again() -> None:
    engine = ProcessEngine(CLIENTS, workers=1)
    pids = worker_pids(engine, 3)
    engine.close()
    assert len(set(pids)) == 1
    assert os.getpid() not in pids


def test_closing_ends_every_process() -> None:
    engine = ProcessEngine(CLIENTS, workers=2)
    pids = worker_pids(engine, 2)
    assert all(is_alive(pid) for pid in pids)
    engine.close()
    assert not any(is_alive(pid) for pid in pids)


def test_closing_ends_processes_that_are_at_work() -> None:
    engine = ProcessEngine(CLIENTS, workers=1)
    (pid,) = worker_pids(engine, 1)
    outcomes = engine.run([task("echo"), task("sleep", seconds=600)], timeout=None)
    next(outcomes)
    engine.close()
    assert not is_alive(pid)
    assert [outcome.status for outcome in outcomes] == ["lost"]


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.communicate()
    assert wait_until_dead(pid)


def test_devices_are_dealt_to_the_workers_in_turn() -> None:
    engine = ProcessEngine(CLIENTS, workers=3, devices=("cuda:0", "cuda:1"), threads=2)
    outcomes = engine.run([task("describe", number) for number in range(3)], timeout=None)
    places = sorted((o.values["device"], o.values["threads"]) for o in outcomes)
    engine.close()
    assert places == [("cuda:0", 2), ("cuda:0", 2), ("cuda:1", 2)]


def test_a_worker_that_does_not_start_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_WORKER", "import time; time.sleep(600)")
    monkeypatch.setattr(processes, "START_LIMIT", 0.2)
    engine = ProcessEngine(CLIENTS, workers=1)
    outcome = run_one(engine, task("echo"), timeout=99)
    engine.close()
    assert outcome.status == "lost"
    assert "within 0.2 s" in outcome.message


def test_a_worker_that_speaks_nonsense_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_WORKER", "print('x' * 99, flush=True)")
    engine = ProcessEngine(CLIENTS, workers=1)
    outcome = run_one(engine, task("echo"), timeout=99)
    engine.close()
    assert outcome.status == "lost"


@pytest.mark.slow
def test_time_for_starting_is_not_the_clients_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly = "import time; time.sleep(3); " + processes._WORKER
    monkeypatch.setattr(processes, "_WORKER", slowly)
    engine = ProcessEngine(CLIENTS, workers=1)
    outcome = run_one(engine, task("echo"), timeout=2.5)
    engine.close()
    assert outcome.status == "ok"
    assert outcome.seconds < 2.5


@pytest.mark.slow
def test_imports_of_the_work_are_not_the_clients_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"import time\ntime.sleep(3)\nfrom {HERE} import echo\n"
    (tmp_path / "slow_to_import.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = Task("t", "a", "slow_to_import:echo")
    engine = ProcessEngine(CLIENTS, workers=1)
    outcomes = [run_one(engine, given, timeout=2.5), run_one(LocalEngine(CLIENTS), given, 2.5)]
    engine.close()
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert all(outcome.seconds < 2.5 for outcome in outcomes)


@pytest.mark.slow
def test_importing_training_takes_what_the_first_optimizer_does() -> None:
    code = "import sys, fedmerge.training as t; from fedmerge.engines import find_work; "
    code += "print('torch._dynamo' in sys.modules); find_work(t.TRAIN); "
    code += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


class Refusing:
    """A system that starts some processes and refuses the next ones."""

    def __init__(self, allowed: int) -> None:
        self.left = allowed
        self.original = subprocess.Popen

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not self.left:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.left -= 1
        return self.original(*arguments, **named)


def test_tasks_of_a_worker_that_cannot_be_started_are_done_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Refusing(1))
    engine = ProcessEngine(CLIENTS, workers=3)
    outcomes = list(engine.run([task("describe", number) for number in range(5)], timeout=None))
    engine.close()
    assert sorted(o.task for o in outcomes) == [f"task-{number}" for number in range(5)]
    assert {o.status for o in outcomes} == {"ok"}
    assert len({o.values["pid"] for o in outcomes}) == 1


def test_tasks_are_lost_where_no_worker_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Refusing(0))
    engine = ProcessEngine(CLIENTS, workers=2)
    outcomes = list(engine.run([task("echo", number) for number in range(3)], timeout=None))
    why = f"its process cannot be started: [Errno {errno.EAGAIN}] Resource temporarily unavailable"
    assert [(o.task, o.status, o.message) for o in outcomes] == [
        (f"task-{number}", "lost", why) for number in range(3)
    ]
    with pytest.raises(
        TrainingError, match=r"^all 4 clients failed; a \(lost\): its process cannot"
    ):
        run_step(
            engine,
            CLIENTS,
            lambda name: Task(name, name, f"{HERE}:echo"),
            policy=RetryPolicy(retries=0),
        )
    monkeypatch.undo()  # the system has room again
    assert run_one(engine, task("echo")).status == "ok"
    engine.close()


def test_one_run_at_a_time() -> None:
    engine = ProcessEngine(CLIENTS, workers=1)
    first = engine.run([task("echo", 0), task("echo", 1)], timeout=None)
    next(first)
    with pytest.raises(RuntimeError, match="running tasks already"):
        run_one(engine, task("echo"))
    first.close()  # type: ignore[attr-defined]
    engine.close()


def test_a_worker_killed_between_tasks_is_replaced() -> None:
    engine = ProcessEngine(CLIENTS, workers=1)
    (pid,) = worker_pids(engine, 1)
    os.kill(pid, signal.SIGKILL)
    # A process whose first thread is gone is dead in /proc before it can be waited for.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (other,) = worker_pids(engine, 1)
    engine.close()
    assert other != pid


@pytest.mark.parametrize(
    ("devices", "threads", "cores", "expected"),
    [
        (("cpu",), 1, 8, 8),
        (("cpu",), 3, 8, 2),
        (("cpu",), 9, 8, 1),
        (("cuda:0", "cuda:1"), 1, 8, 2),
    ],
)
def test_there_is_a_worker_per_accelerator_or_as_many_as_the_cores_can_feed(
    monkeypatch: pytest.MonkeyPatch,
    devices: tuple[str, ...],
    threads: int,
    cores: int,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert default_workers(devices, threads) == expected


def shadow_modules(folder: Path) -> Path:
    """Put modules of the standard library's names into a folder; return what they would create."""
    canary = folder / "canary"
    for name in ("signal", "queue", "threading", "subprocess", "json", "random", "cProfile"):
        text = f"open({str(canary)!r}, 'a').write({name!r})\nraise ImportError('shadow')\n"
        (folder / f"{name}.py").write_text(text)
    return canary


def test_workers_import_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = shadow_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    engine = ProcessEngine(CLIENTS, workers=1)
    outcome = run_one(engine, task("echo"), timeout=99)
    engine.close()
    assert outcome.status == "ok", outcome.message
    assert not canary.exists()
    subprocess.run([sys.executable, "-c", "import queue"], check=False, capture_output=True)
    assert canary.exists(), "without care it would be imported"


def test_another_python_has_our_path_and_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = shadow_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = "import signal, json; print(json.dumps([sys.argv[1:], sys.path]))"
    done = subprocess.run(
        python_command(code, "a", "b c"), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [["a", "b c"], sys.path]
    assert not canary.exists()


ELSEWHERE = f"""
import signal, sys, threading, time
sys.path[:] = {sys.path!r}
from fedmerge.engines import ProcessEngine, Task

def interrupt():
    time.sleep(3)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
engine = ProcessEngine(["a"], workers=1)
try:
    list(engine.run([Task("t", "a", "{HERE}:sleep", {{}}, {{"seconds": 600}})], timeout=None))
except KeyboardInterrupt:
    print("heard")
engine.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="other signals there")
def test_a_signal_that_another_thread_got_ends_the_wait_for_results() -> None:
    """The system gives signals to other threads while the main one starts a process."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == "heard\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups there")
def test_signals_of_a_terminal_do_not_reach_workers(engine: ProcessEngine) -> None:
    outcome = run_one(engine, task("describe"))
    assert os.getpgid(int(outcome.values["pid"])) != os.getpgid(0)
