"""One step with known answers, at the edges of its shortcuts."""

import numpy as np
import pytest

from fedmerge.matching import NEW, Shortcuts, SolverName, StepProblem, assignment, best_step
from fedmerge.values import Float64Array, IntArray
from tests.unit.matching.cases import NO_SHORTCUTS, step_score


def ranks(count: int) -> Float64Array:
    return np.asarray(-2 * np.log(np.arange(1, count + 1)))


def test_a_unit_joins_what_rewards_it_most() -> None:
    problem = StepProblem(np.array([[5.0, 1.0], [4.0, 3.0]]), ranks(2))
    targets = best_step(problem, "auto", Shortcuts())
    assert targets.tolist() == [0, 1]
    assert step_score(problem, targets) == 8.0


def test_a_unit_that_nothing_suits_becomes_new() -> None:
    problem = StepProblem(np.array([[5.0, 1.0], [-9.0, -9.0]]), ranks(2))
    targets = best_step(problem, "auto", Shortcuts())
    assert targets.tolist() == [0, NEW]
    assert step_score(problem, targets) == 5.0


def test_rejected_units_use_up_the_better_new_rewards() -> None:
    # One row is surely new and takes the reward 0, so the other one compares -1 with -2·log 2.
    problem = StepProblem(np.array([[-99.0], [-1.0]]), ranks(2))
    assert best_step(problem, "auto", Shortcuts()).tolist() == [NEW, 0]
    alone = StepProblem(np.array([[-1.0]]), ranks(1))
    assert best_step(alone, "auto", Shortcuts()).tolist() == [NEW]


def test_a_cap_forces_units_into_bad_columns() -> None:
    problem = StepProblem(np.array([[-50.0, -60.0], [-70.0, -90.0]]), ranks(0))
    assert best_step(problem, "auto", Shortcuts()).tolist() == [1, 0]
    one_new = StepProblem(problem.existing, ranks(1))
    assert best_step(one_new, "auto", Shortcuts()).tolist() == [0, NEW]


def test_without_columns_every_unit_is_new() -> None:
    problem = StepProblem(np.zeros((3, 0)), ranks(3))
    for shortcuts in (Shortcuts(), NO_SHORTCUTS):
        assert best_step(problem, "auto", shortcuts).tolist() == [NEW] * 3


def test_no_room_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="no room"):
        best_step(StepProblem(np.zeros((3, 1)), ranks(1)), "auto", Shortcuts())


def test_few_new_columns_are_offered_and_doubled_until_one_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offers: list[int] = []
    original = assignment._solve_offered

    def recorded(problem: StepProblem, offered: int, solver: SolverName) -> IntArray:
        offers.append(offered)
        return original(problem, offered, solver)

    monkeypatch.setattr(assignment, "_solve_offered", recorded)
    # All rows want the same three columns: the estimate sees no need for new ones.
    problem = StepProblem(np.hstack([np.full((40, 3), 9.0), np.full((40, 60), -99.0)]), ranks(40))
    only_reduce = Shortcuts(prune=False, price=False, greedy=False)
    targets = best_step(problem, "auto", only_reduce)
    assert np.count_nonzero(targets == NEW) == 37
    assert offers == [8, 16, 32, 40]


def test_no_solver_is_called_where_favourites_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rewards: Float64Array, solver: SolverName) -> IntArray:
        raise AssertionError("solver called")

    monkeypatch.setattr(assignment, "solve", fail)
    rewards = np.array([[1.0, 5.0], [7.0, 6.0]])
    assert best_step(StepProblem(rewards, ranks(2)), "auto", Shortcuts()).tolist() == [1, 0]
    with pytest.raises(AssertionError, match="solver called"):
        best_step(StepProblem(rewards, ranks(2)), "auto", Shortcuts(price=False, greedy=False))
    with pytest.raises(AssertionError, match="solver called"):
        best_step(StepProblem(rewards[:, [0, 0]], ranks(2)), "scipy", Shortcuts())
