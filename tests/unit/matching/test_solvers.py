"""The solvers agree with each other and with brute force, also where many optima tie."""

import builtins
import math
import sys
from typing import Any

import numpy as np
import pytest

from fedmerge.matching import SOLVERS, SolverName, assignment, can_price, solve
from fedmerge.values import Float64Array
from tests.unit.matching.cases import brute_force_score

RNG = np.random.default_rng(1)
NAMES: list[SolverName] = list(SOLVERS)


def kinds(rows: int, columns: int) -> dict[str, Float64Array]:
    plain = RNG.standard_normal((rows, columns))
    return {
        "generic": plain,
        "tied": np.round(plain),
        "constant": np.full((rows, columns), -3.5),
        "zero": np.zeros((rows, columns)),
        "equal rows": np.repeat(plain[:1], rows, axis=0),
        "equal columns": np.repeat(plain[:, :1], columns, axis=1),
        "ranks": np.repeat(-2 * np.log(np.arange(1, columns + 1))[None], rows, axis=0),
        "huge": plain * 1e15 + RNG.standard_normal((rows, columns)),
        "spread": plain * 10.0 ** RNG.integers(0, 12, (rows, columns)),
    }


def total(rewards: Float64Array, columns: list[int]) -> float:
    return math.fsum(rewards[row, column] for row, column in enumerate(columns))


@pytest.mark.parametrize("solver", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 3), (4, 6), (5, 5), (5, 6)])
def test_every_solver_finds_the_brute_force_optimum(
    shape: tuple[int, int], solver: SolverName
) -> None:
    for kind, rewards in kinds(*shape).items():
        columns = solve(rewards, solver).tolist()
        best = brute_force_score(rewards, np.zeros(0))
        assert len(set(columns)) == shape[0], kind
        assert total(rewards, columns) == pytest.approx(best, rel=1e-12, abs=1e-12), kind


@pytest.mark.parametrize("solver", NAMES)
@pytest.mark.parametrize("shape", [(60, 60), (60, 62), (60, 90), (60, 300)])
def test_solvers_agree_on_larger_problems(shape: tuple[int, int], solver: SolverName) -> None:
    for kind, rewards in kinds(*shape).items():
        found = total(rewards, solve(rewards, solver).tolist())
        scale = float(np.abs(rewards).max()) * shape[0]
        assert abs(found - total(rewards, solve(rewards, "scipy").tolist())) <= 1e-13 * scale, kind


@pytest.mark.parametrize("solver", NAMES)
def test_no_rows_need_no_columns(solver: SolverName) -> None:
    assert solve(np.zeros((0, 3)), solver).tolist() == []
    assert solve(np.zeros((0, 0)), solver).tolist() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_reaches_a_solver(value: float) -> None:
    rewards = np.zeros((2, 3))
    rewards[1, 1] = value
    with pytest.raises(AssertionError, match="finite"):
        solve(rewards, "auto")


def test_rewards_are_not_changed() -> None:
    rewards = RNG.standard_normal((4, 5))
    kept = rewards.copy()
    for solver in NAMES:
        solve(rewards, solver)
    assert (rewards == kept).all()


@pytest.mark.parametrize("solver", ["auto", "lapjv"])
def test_an_older_lapx_will_do(solver: SolverName, monkeypatch: pytest.MonkeyPatch) -> None:
    import lap

    def missing(*arguments: object, **options: object) -> None:
        raise AssertionError("no lapjvh here")

    monkeypatch.setattr(assignment, "_has_lapjvh", lambda: False)
    monkeypatch.setattr(lap, "lapjvh", missing)
    assert not can_price(solver)
    for shape in [(1, 1), (4, 4), (4, 5), (30, 70)]:
        rewards = RNG.standard_normal(shape)
        assert solve(rewards, solver).tolist() == solve(rewards, "scipy").tolist()


def test_auto_needs_no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_scipy(name: str, *rest: Any, **options: Any) -> Any:
        assert not name.startswith("scipy"), "scipy imported"
        return original(name, *rest, **options)

    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_scipy)
    assert solve(np.eye(3), "auto").tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="scipy imported"):
        solve(np.eye(3), "scipy")
