"""One function over the linear assignment solvers."""

from collections.abc import Callable

import numpy as np

from fedmerge.matching.values import SolverName
from fedmerge.types.arrays import Float64Array, IntArray


def solve(rewards: Float64Array, solver: SolverName) -> IntArray:
    """Return (rows,) distinct columns of (rows, columns) rewards whose sum is the largest."""
    rows, columns = rewards.shape
    assert rows <= columns, "more rows than columns"
    assert np.isfinite(rewards).all(), "rewards must be finite"
    if rows == 0:
        return np.zeros(0, dtype=np.int64)
    return SOLVERS[solver](rewards)


def _has_lapjvh() -> bool:
    """Return whether lapx is 0.11 or later, and built with its newer solvers."""
    try:
        from lap import lapjvh  # noqa: F401
    except ImportError:
        return False
    return True


def _scipy(rewards: Float64Array) -> IntArray:
    """Solve by scipy, whose import alone takes longer than many a merge."""
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(rewards, maximize=True)
    return np.asarray(columns, dtype=np.int64)


def can_price(solver: SolverName) -> bool:
    """Return whether this solver can leave rows unassigned at a price."""
    return solver in ("auto", "lapjv") and _has_lapjvh()


def solve_priced(costs: Float64Array, price: float) -> IntArray:
    """Return (rows,) distinct columns of (rows, columns) costs, -1 for rows paid `price` instead.

    The total of prices paid minus costs is the largest. lapx charges half its limit for each row
    and each column left out, that is the limit less for every pair.
    """
    import lap

    assert np.isfinite(costs).all(), "costs must be finite"
    rows, columns = lap.lapjvh(costs, cost_limit=-price, return_cost=False)
    found = np.full(len(costs), -1, dtype=np.int64)
    found[rows] = columns
    return found


def _lapjv(rewards: Float64Array) -> IntArray:
    """Solve by lapx's `lapjvh`, or `lapjv` before it, which take costs: the negated rewards."""
    import lap

    if not _has_lapjvh():
        found, _ = lap.lapjv(-rewards, extend_cost=True, return_cost=False)
        return np.asarray(found, dtype=np.int64)
    _, found = lap.lapjvh(-rewards, extend_cost=True, return_cost=False)
    return np.asarray(found, dtype=np.int64)


def _lapsolver(rewards: Float64Array) -> IntArray:
    """Solve by lapsolver, the paper's choice, or by its twin in lapx, which take costs.

    The package returns wrong indices under numpy 2 without a word, so it is used before that only.
    """
    if int(np.__version__.split(".")[0]) < 2:
        try:
            from lapsolver import solve_dense
        except ImportError:
            pass
        else:
            return np.asarray(solve_dense(-rewards)[1], dtype=np.int64)
    import lap

    _, columns = lap.lapjvc(-rewards, return_cost=False)
    return np.asarray(columns, dtype=np.int64)


def _auto(rewards: Float64Array) -> IntArray:
    """Solve by lapx, at least as fast as scipy at every shape; by scipy where it lacks `lapjvh`."""
    return _lapjv(rewards) if _has_lapjvh() else _scipy(rewards)


SOLVERS: dict[SolverName, Callable[[Float64Array], IntArray]] = {
    "auto": _auto,
    "scipy": _scipy,
    "lapjv": _lapjv,
    "lapsolver": _lapsolver,
}
