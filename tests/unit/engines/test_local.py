from collections.abc import Iterator

import pytest

from fedmerge.engines import LocalEngine, Task
from tests.unit.engines.conformance import CLIENTS, Conformance, run_one, task


class TestLocalEngine(Conformance):
    width = 1

    @pytest.fixture
    def engine(self) -> Iterator[LocalEngine]:
        engine = LocalEngine(CLIENTS)
        yield engine
        engine.close()


def test_a_task_runs_when_its_outcome_is_asked_for() -> None:
    taken = []

    def tasks() -> Iterator[Task]:
        for number in range(3):
            taken.append(number)
            yield task("echo", number)

    outcomes = LocalEngine(CLIENTS).run(tasks(), timeout=None)
    assert taken == []
    next(outcomes)
    assert taken == [0]


def test_an_interrupt_is_the_users_and_no_outcome() -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run_one(LocalEngine(CLIENTS), task("interrupt_self"))
