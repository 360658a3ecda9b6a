from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from fedmerge.engines import ClientInfo, Outcome, RetryPolicy, Task, run_step
from fedmerge.errors import TrainingError

CLIENTS = ("a", "b", "c")


@dataclass
class ScriptedEngine:
    """Gives each client's next prepared outcome; the last client's comes first."""

    script: dict[str, list[Outcome]]
    gone: set[str] = field(default_factory=set)
    ran: list[list[str]] = field(default_factory=list)

    def clients(self) -> Sequence[ClientInfo]:
        return [ClientInfo(name, "here") for name in self.script if name not in self.gone]

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        names = [task.client for task in tasks]
        self.ran.append(names)
        for name in reversed(names):
            yield self.script[name].pop(0)

    def close(self) -> None:
        pass


def ok(client: str, value: float = 1.0) -> Outcome:
    return Outcome("t", client, "ok", {"w": np.array([value, 0.0])})


def lost(client: str) -> Outcome:
    return Outcome("t", client, "lost", message="its process was ended by SIGKILL")


def make(client: str) -> Task:
    return Task(client, client, "module:name")


def all_ok() -> dict[str, list[Outcome]]:
    return {name: [ok(name)] for name in CLIENTS}


def test_results_stand_in_the_clients_order_whoever_was_first() -> None:
    heard: list[str] = []
    found = run_step(
        ScriptedEngine(all_ok()),
        CLIENTS,
        make,
        policy=RetryPolicy(),
        hear=lambda outcome: heard.append(outcome.client),
    )
    assert heard == ["c", "b", "a"]
    assert list(found.done) == ["a", "b", "c"]
    assert found.missing == {}


def test_only_failed_clients_are_tried_again() -> None:
    engine = ScriptedEngine({**all_ok(), "b": [lost("b"), lost("b"), ok("b")]})
    found = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=2))
    assert engine.ran == [["a", "b", "c"], ["b"], ["b"]]
    assert {name: o.attempts for name, o in found.done.items()} == {"a": 1, "b": 3, "c": 1}


def test_a_client_that_fails_to_the_end_is_missing_with_its_last_reason() -> None:
    engine = ScriptedEngine({**all_ok(), "b": [Outcome("t", "b", "timeout"), lost("b")]})
    found = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=1, min_clients=2))
    assert list(found.done) == ["a", "c"]
    assert {n: (o.status, o.attempts) for n, o in found.missing.items()} == {"b": ("lost", 2)}


def test_without_retries_there_is_one_attempt() -> None:
    engine = ScriptedEngine({**all_ok(), "b": [lost("b"), ok("b")]})
    found = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=0))
    assert list(found.missing) == ["b"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_result_that_is_not_finite_is_a_failure(value: float) -> None:
    engine = ScriptedEngine({**all_ok(), "b": [ok("b", value), ok("b", 2.0)]})
    heard: list[Outcome] = []
    found = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=1), hear=heard.append)
    bad = next(outcome for outcome in heard if outcome.client == "b")
    assert (bad.status, bad.arrays) == ("app", {})
    assert bad.message == "returned NaN or Inf in 1 of 2 values of 'w'"
    assert found.done["b"].arrays["w"][0] == 2.0


def test_integers_are_always_finite() -> None:
    counted = Outcome("t", "b", "ok", {"count": np.array(3), "flag": np.array([True])})
    found = run_step(
        ScriptedEngine({**all_ok(), "b": [counted]}), CLIENTS, make, policy=RetryPolicy(retries=0)
    )
    assert "b" in found.done


def test_the_caller_may_find_further_problems() -> None:
    engine = ScriptedEngine({**all_ok(), "c": [ok("c", 5.0)]})
    problem: Callable[[Outcome], str] = lambda o: "too large" if o.arrays["w"][0] > 4 else ""  # noqa: E731
    found = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=0), find_problem=problem)
    assert {n: o.message for n, o in found.missing.items()} == {"c": "too large"}


def test_too_few_clients_fail_the_step_with_everyones_reason() -> None:
    engine = ScriptedEngine({"a": [ok("a")], "b": [lost("b")], "c": [ok("c", np.nan)]})
    with pytest.raises(
        TrainingError, match=r"1 of 3 .* 2 are needed; b \(lost\): .*SIGKILL; c \(app\): .*NaN"
    ):
        run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=0, min_clients=2))


def test_of_many_reasons_the_first_are_named() -> None:
    names = [f"c{number}" for number in range(6)]
    engine = ScriptedEngine({"c0": [ok("c0")], **{name: [lost(name)] for name in names[1:]}})
    with pytest.raises(TrainingError, match=r"1 of 6 .* c3 \(lost\): [^;]*; and 2 more$"):
        run_step(engine, names, make, policy=RetryPolicy(retries=0, min_clients=2))


def test_what_all_clients_fail_at_is_told_once_with_its_own_hint() -> None:
    failed = {n: [Outcome("t", n, "app", message="bad rate", hint="lower it")] for n in CLIENTS}
    with pytest.raises(TrainingError, match=r"^all 3 clients failed; a \(app\): bad rate$") as told:
        run_step(ScriptedEngine(failed), CLIENTS, make, policy=RetryPolicy(retries=0))
    assert told.value.hint == "lower it"


def test_a_client_that_cannot_be_placed_is_not_waited_for() -> None:
    engine = ScriptedEngine(all_ok(), gone={"b"})
    found = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=3))
    assert engine.ran == [["a", "c"]]
    assert found.missing["b"].message == "cannot be placed anywhere now"
    assert found.missing["b"].attempts == 0


def test_a_client_that_disappears_keeps_the_reason_of_its_failure() -> None:
    engine = ScriptedEngine({**all_ok(), "b": [lost("b")]})

    def hear(outcome: Outcome) -> None:
        engine.gone |= {outcome.client} if outcome.status == "lost" else set()

    found = run_step(engine, CLIENTS, make, policy=RetryPolicy(retries=3), hear=hear)
    assert engine.ran == [["a", "b", "c"]]
    assert found.missing["b"].message == "its process was ended by SIGKILL"


def test_tasks_are_made_only_when_the_engine_takes_them() -> None:
    made: list[str] = []

    class Lazy(ScriptedEngine):
        def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
            for number, task in enumerate(tasks, start=1):
                assert len(made) == number
                yield ok(task.client)

    def remember(client: str) -> Task:
        made.append(client)
        return make(client)

    run_step(Lazy(all_ok()), CLIENTS, remember, policy=RetryPolicy())
    assert made == ["a", "b", "c"]
