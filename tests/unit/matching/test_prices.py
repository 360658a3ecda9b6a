"""New units at one price against new units as columns."""

import itertools
import math

import numpy as np
import pytest

from fedmerge.matching import (
    Shortcuts,
    StepProblem,
    assignment,
    best_step,
    can_price,
    new_rewards,
    solve_at_price,
    solve_priced,
)
from fedmerge.values import Float64Array, IntArray
from tests.unit.matching.cases import NO_SHORTCUTS, step_score

RNG = np.random.default_rng(4)
PRICES = Shortcuts(prune=False, greedy=False)


def brute_force_priced(costs: Float64Array, price: float) -> float:
    rows, columns = costs.shape
    best = -math.inf
    for count in range(min(rows, columns) + 1):
        for chosen in itertools.combinations(range(rows), count):
            for targets in itertools.permutations(range(columns), count):
                pairs = zip(chosen, targets, strict=True)
                paid = price * (rows - count)
                best = max(best, paid - math.fsum(costs[row, column] for row, column in pairs))
    return best


def priced_total(costs: Float64Array, price: float, found: IntArray) -> float:
    return math.fsum(
        price if column < 0 else -costs[row, column] for row, column in enumerate(found.tolist())
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (3, 4), (4, 4), (4, 1), (2, 0)])
@pytest.mark.parametrize("price", [-3.0, -0.5, 0.0, 0.7, 3.0])
def test_rows_are_left_out_where_the_price_is_better(shape: tuple[int, int], price: float) -> None:
    for costs in (RNG.standard_normal(shape), np.round(RNG.standard_normal(shape))):
        found = solve_priced(costs, price)
        taken = found[found >= 0].tolist()
        assert len(set(taken)) == len(taken)
        assert priced_total(costs, price, found) == pytest.approx(brute_force_priced(costs, price))


@pytest.mark.parametrize("likely", [0, 7, 40])
@pytest.mark.parametrize("columns", [5, 30, 60])
def test_a_price_finds_the_optimum_of_the_columns(columns: int, likely: int) -> None:
    new = new_rewards(40, 6, 1.0)
    for shift in (-9.0, -4.0, 0.0):
        rewards = 2 * RNG.standard_normal((40, columns)) + shift
        found = solve_at_price(rewards, new, likely=likely)
        assert found is not None
        problem = StepProblem(rewards, new)
        best = step_score(problem, best_step(problem, "scipy", NO_SHORTCUTS))
        assert step_score(problem, found) == pytest.approx(best, abs=1e-10)


def test_a_wrong_price_is_not_the_optimum() -> None:
    rewards, new = 2 * RNG.standard_normal((40, 50)) - 9, new_rewards(40, 6, 1.0)
    problem = StepProblem(rewards, new)
    best = step_score(problem, best_step(problem, "scipy", NO_SHORTCUTS))
    for price in (0.0, -30.0):
        assert step_score(problem, solve_priced(-rewards, price)) < best - 1


@pytest.mark.parametrize("most", [1, 5, 20])
@pytest.mark.parametrize("columns", [39, 40, 60])
def test_a_price_finds_the_optimum_where_a_cap_binds(columns: int, most: int) -> None:
    new = new_rewards(most, 6, 1.0)
    for likely in (0, most):
        rewards = 2 * RNG.standard_normal((40, columns)) - 50
        found = solve_at_price(rewards, new, likely=likely)
        assert found is not None
        assert np.count_nonzero(found < 0) == most
        problem = StepProblem(rewards, new)
        assert found.tolist() == best_step(problem, "scipy", NO_SHORTCUTS).tolist()


def test_a_cap_that_is_passed_at_too_high_a_price_only_changes_nothing() -> None:
    # At a guess of one new unit too many are new, at the price of the last allowed one too few.
    new = np.array([0.0, -40.0])
    rewards = np.array([[-1.0, -9.0], [-9.0, -1.0], [-30.0, -2.0]])
    assert solve_at_price(rewards, new, likely=0) is None
    found = best_step(StepProblem(rewards, new), "auto", PRICES)
    assert found.tolist() == best_step(StepProblem(rewards, new), "scipy", NO_SHORTCUTS).tolist()
    assert found.tolist() == [0, 1, -1]


def test_no_price_is_found_where_a_cap_binds_and_all_columns_are_equal() -> None:
    rewards, new = np.full((6, 9), -50.0), new_rewards(2, 6, 1.0)
    assert solve_at_price(rewards, new, likely=0) is None
    found = best_step(StepProblem(rewards, new), "auto", PRICES)
    assert np.count_nonzero(found < 0) == 2


def test_no_price_is_found_where_one_step_of_it_frees_many_rows() -> None:
    # Every row earns -5 everywhere: at a lower price none is new, at a higher one all are, while
    # the rewards -2·log(6k) fall below -5 after the second.
    rewards, new = np.full((6, 9), -5.0), new_rewards(6, 6, 1.0)
    assert solve_at_price(rewards, new, likely=0) is None
    found = best_step(StepProblem(rewards, new), "auto", PRICES)
    assert np.count_nonzero(found < 0) == 2


def test_the_search_for_a_price_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    original = solve_priced

    def recorded(costs: Float64Array, price: float) -> IntArray:
        tried.append(price)
        return original(costs, price)

    monkeypatch.setattr(assignment, "solve_priced", recorded)
    rewards, new = 2 * RNG.standard_normal((300, 250)) - 9, new_rewards(300, 6, 1.0)
    found = solve_at_price(rewards, new, likely=0)
    assert found is not None
    assert len(tried) <= 10
    tried.clear()
    solve_at_price(rewards, new, likely=int(np.count_nonzero(found < 0)))
    assert len(tried) <= 2


def test_only_lapx_knows_prices() -> None:
    assert can_price("auto")
    assert can_price("lapjv")
    assert not can_price("scipy")
    assert not can_price("lapsolver")
