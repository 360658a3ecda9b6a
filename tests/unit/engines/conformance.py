"""What every engine must do: subclass `Conformance` and give it an `engine`."""

import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from fedmerge.engines import Engine, Outcome, RetryPolicy, Task, run_step
from fedmerge.training import TRAIN, ClientWork, train
from fedmerge.values import Array, Arrays, Place, TrainSettings
from tests.unit.engines.work import HERE
from tests.unit.training.models import BUILDER, start_arrays, write_images

CLIENTS = ("a", "b", "c", "d")
LARGE = 50_000_000  # bytes


def task(function: str, number: int = 0, **settings: object) -> Task:
    client = CLIENTS[number % len(CLIENTS)]
    return Task(f"task-{number}", client, f"{HERE}:{function}", {}, settings)


def run_one(engine: Engine, one: Task, timeout: float | None = None) -> Outcome:
    (outcome,) = engine.run([one], timeout=timeout)
    return outcome


class Conformance:
    """The tests; `engine` runs the clients of `CLIENTS` with one thread on the CPU."""

    width: int  # tasks that run side by side

    def test_every_client_can_be_placed(self, engine: Engine) -> None:
        assert [client.name for client in engine.clients()] == list(CLIENTS)

    def test_a_task_gives_its_arrays_and_values(self, engine: Engine) -> None:
        given = Task("t", "b", f"{HERE}:double", {"x": np.arange(3.0)}, {"round": 2})
        outcome = run_one(engine, given)
        assert (outcome.task, outcome.client, outcome.status) == ("t", "b", "ok")
        assert outcome.arrays["x"].tolist() == [0, 2, 4]
        assert outcome.values == {"round": 2}
        assert (outcome.message, outcome.attempts, outcome.nbytes) == ("", 1, 24)
        assert outcome.seconds >= 0

    def test_there_is_exactly_one_outcome_per_task(self, engine: Engine) -> None:
        kinds = ["echo", "fail", "echo", "leave", "echo", "refuse", "echo"]
        tasks = [task(kind, number, name="n") for number, kind in enumerate(kinds)]
        outcomes = list(engine.run(iter(tasks), timeout=None))
        assert sorted(o.task for o in outcomes) == sorted(t.id for t in tasks)
        status = {o.task: o.status for o in outcomes}
        expected = ["ok" if kind == "echo" else "app" for kind in kinds]
        assert [status[t.id] for t in tasks] == expected

    def test_no_tasks_give_no_outcomes(self, engine: Engine) -> None:
        assert list(engine.run([], timeout=None)) == []

    def test_outcomes_come_in_the_order_in_which_tasks_end(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        slow, fast = task("wait", 0, folder=str(tmp_path)), task("echo", 1)
        if self.width == 1:
            (tmp_path / "no other task can come first").touch()
        order = []
        for outcome in engine.run([slow, fast], timeout=None):
            order.append(outcome.task)
            (tmp_path / outcome.task).touch()
        assert order == ([fast.id, slow.id] if self.width > 1 else [slow.id, fast.id])

    def test_tasks_are_taken_only_when_they_can_start(self, engine: Engine) -> None:
        taken: list[int] = []

        def tasks() -> Iterator[Task]:
            for number in range(8):
                taken.append(number)
                yield task("echo", number)

        for done, _ in enumerate(engine.run(tasks(), timeout=None), start=1):
            assert len(taken) <= done + self.width
        assert taken == list(range(8))

    def test_code_that_fails_is_reported_with_its_traceback(self, engine: Engine) -> None:
        outcome = run_one(engine, task("fail", name="shard-1"))
        assert (outcome.status, outcome.arrays) == ("app", {})
        assert outcome.message == "ZeroDivisionError: no data for shard-1"
        assert "work.py" in outcome.details
        assert "in fail" in outcome.details

    def test_our_own_errors_are_reported_as_they_read(self, engine: Engine) -> None:
        refusal = run_one(engine, task("refuse"))
        assert (refusal.message, refusal.hint) == ("shard.npz: is empty", "fill it")

    def test_code_that_wants_to_exit_has_failed(self, engine: Engine) -> None:
        outcome = run_one(engine, task("leave"))
        assert (outcome.status, outcome.message) == ("app", "SystemExit: 3")

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            ("nowhere", "AttributeError: .* has no attribute 'nowhere'"),
            ("not_a_result", "TypeError: the result 'objects' holds Python objects"),
        ],
    )
    def test_work_that_breaks_the_contract_has_failed(
        self, engine: Engine, function: str, message: str
    ) -> None:
        outcome = run_one(engine, task(function))
        assert outcome.status == "app"
        assert re.match(message, outcome.message)

    def test_arrays_travel_bit_by_bit(self, engine: Engine) -> None:
        rng = np.random.default_rng(0)
        arrays: dict[str, Array] = {
            "half": rng.normal(size=(3, 5)).astype(np.float16),
            "single": rng.normal(size=(2, 3, 4)).astype(np.float32),
            "double": np.array([np.nan, -0.0, np.inf, 5e-324]),
            "turned": rng.normal(size=(4, 6)).T,
            "strided": np.arange(10)[::3],
            "count": np.array(7, dtype=np.int64),
            "empty": np.empty((0, 3), np.float32),
            "mask": np.array([True, False]),
            "bytes": np.arange(256, dtype=np.uint8),
        }
        outcome = run_one(engine, Task("t", "a", f"{HERE}:echo", arrays, {}))
        assert list(outcome.arrays) == list(arrays)
        for name, array in arrays.items():
            back = outcome.arrays[name]
            assert (back.dtype, back.shape) == (array.dtype, array.shape)
            assert back.tobytes() == array.tobytes()

    def test_large_arrays_travel(self, engine: Engine) -> None:
        large = np.random.default_rng(0).integers(0, 255, LARGE, dtype=np.uint8)
        outcome = run_one(engine, Task("t", "a", f"{HERE}:echo", {"x": large}, {}))
        assert np.array_equal(outcome.arrays["x"], large)

    def test_nan_is_a_result_like_any_other(self, engine: Engine) -> None:
        given = {"x": np.array([1.0, np.nan])}
        outcome = run_one(engine, Task("t", "a", f"{HERE}:double", given, {}))
        assert outcome.status == "ok"
        assert np.isnan(outcome.arrays["x"]).tolist() == [False, True]

    def test_work_cannot_change_its_inputs(self, engine: Engine) -> None:
        given = Task("t", "a", f"{HERE}:change_input", {"x": np.zeros(2)}, {})
        assert "read-only" in run_one(engine, given).message
        assert given.arrays["x"].tolist() == [0, 0]

    def test_work_is_told_where_it_runs(self, engine: Engine) -> None:
        values = run_one(engine, task("describe", pair=(1, 2)), timeout=99).values
        assert (values["device"], values["threads"], values["timeout"]) == ("cpu", 1, 99)
        assert values["types"] == {"pair": "list"}  # as after a journey through JSON

    def test_what_work_prints_is_kept_from_stdout(
        self, engine: Engine, capfd: pytest.CaptureFixture[str]
    ) -> None:
        outcome = run_one(engine, task("talk"))
        assert outcome.values == {"said": True}
        assert "user's code" not in capfd.readouterr().out

    def test_training_gives_the_same_bits_as_in_this_process(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        shard = write_images(tmp_path / "a.npz", seed=3)
        training = TrainSettings(epochs=2, batch_size=16, seed=5, proximal=0.01)
        work = ClientWork("a", BUILDER, str(shard), training=training, frozen=("conv.weight",))
        given = Task("t", "a", TRAIN, start_arrays(seed=1), work.to_json())
        outcome = run_one(engine, given)
        assert (outcome.status, outcome.message) == ("ok", "")
        expected = train(given.arrays, given.settings, Place())  # no engine
        assert digests(outcome.arrays) == digests(expected.arrays)
        assert outcome.values["losses"] == list(expected.values["losses"])

    def test_a_closed_generator_leaves_nothing_for_the_next_run(self, engine: Engine) -> None:
        outcomes = engine.run([task("sleep", k, seconds=0.3) for k in range(4)], timeout=None)
        next(outcomes)
        outcomes.close()  # type: ignore[attr-defined]
        assert [o.task for o in engine.run([task("echo", 9)], timeout=None)] == ["task-9"]

    def test_an_exception_of_the_tasks_is_not_swallowed(self, engine: Engine) -> None:
        def tasks() -> Iterator[Task]:
            yield task("echo")
            raise LookupError("no more weights")

        with pytest.raises(LookupError, match="no more weights"):
            list(engine.run(tasks(), timeout=None))
        assert run_one(engine, task("echo")).status == "ok"

    def test_late_work_is_a_timeout(self, engine: Engine) -> None:
        outcome = run_one(engine, task("sleep", seconds=0.6), timeout=0.3)
        assert (outcome.status, outcome.values) == ("timeout", {})
        assert "0.3 s" in outcome.message
        assert run_one(engine, task("sleep", seconds=0.0), timeout=30).status == "ok"

    def test_closing_twice_does_no_harm(self, engine: Engine) -> None:
        list(engine.run([task("echo")], timeout=None))
        engine.close()
        engine.close()


class IsolatedConformance(Conformance):
    """Further tests of engines whose work may die or hang."""

    killed = "SIGKILL"  # what is said of a process that was killed

    def test_work_that_hangs_is_stopped(self, engine: Engine) -> None:
        tasks = [task("sleep", 0, seconds=6000), task("echo", 1), task("echo", 2)]
        outcomes = {o.task: o.status for o in engine.run(tasks, timeout=2.0)}
        assert outcomes == {"task-0": "timeout", "task-1": "ok", "task-2": "ok"}

    def test_work_whose_process_is_killed_is_lost(self, engine: Engine) -> None:
        tasks = [task("die", 0), task("echo", 1), task("echo", 2)]
        outcomes = {o.task: o for o in engine.run(tasks, timeout=None)}
        assert {o.status for o in outcomes.values()} == {"ok", "lost"}
        assert outcomes["task-0"].status == "lost"
        assert self.killed in outcomes["task-0"].message

    def test_lost_work_can_be_run_again(self, engine: Engine, tmp_path: Path) -> None:
        mark = str(tmp_path / "mark")

        def make(client: str) -> Task:
            function = "die_once" if client == "b" else "echo"
            return Task(client, client, f"{HERE}:{function}", {}, {"mark": mark})

        step = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=1))
        assert list(step.done) == list(CLIENTS)
        assert {name: o.attempts for name, o in step.done.items()} == {
            **dict.fromkeys(CLIENTS, 1),
            "b": 2,
        }


def digests(arrays: Arrays) -> dict[str, str]:
    return {name: sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
