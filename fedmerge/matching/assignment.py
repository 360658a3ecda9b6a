"""The assignment problem of one client, solved exactly."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedmerge.matching.scores import Shortcuts, SolverName
from fedmerge.values.arrays import Float64Array, IntArray


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


MAX_TRIES = 24  # then the caller builds the columns; changes the time only


@dataclass(frozen=True)
class Trial:
    """A price and the number of units that would be new at it, as a price of their own."""

    price: float
    fitting: float  # in the middle of the prices at which so many are new in truth

    @property
    def excess(self) -> float:
        """Return by how much the price is too high; it rises with the price."""
        return self.price - self.fitting


def solve_at_price(existing: Float64Array, new: Float64Array, *, likely: int) -> IntArray | None:
    """Return (rows,) best columns of (rows, columns), -1 for new; None where no price is found.

    `new` holds the rewards of the first, second, … new unit, and `likely` a guess of their number.
    """
    costs = -existing  # what the solver minimises
    low, high = -math.inf, math.inf
    trials: list[Trial] = []
    price = _fitting_price(new, min(likely, len(new)))
    for _ in range(MAX_TRIES):
        found = solve_priced(costs, price)
        added = int(np.count_nonzero(found < 0))
        if added > len(new):
            return _solve_at_cap(costs, len(new), min(price, float(new[-1])))
        floor = new[added] if added < len(new) else -math.inf
        ceiling = new[added - 1] if added else math.inf
        if floor <= price <= ceiling:
            return found
        if price > ceiling:
            low, high = max(low, floor), price
        else:
            low, high = price, min(high, ceiling)
        trials.append(Trial(price, _fitting_price(new, added)))
        price = _next_price(trials, low, high)
    return None


def _solve_at_cap(costs: Float64Array, most: int, high: float) -> IntArray | None:
    """Return (rows,) best columns at a price of at most `high` at which just `most` rows are new.

    The number of new rows rises with the price, from none at the lowest reward of all.
    """
    low, price = -float(costs.max()), high
    for _ in range(MAX_TRIES):
        found = solve_priced(costs, price)
        added = int(np.count_nonzero(found < 0))
        if added == most:
            return found
        if added > most:
            high = price
        elif price == high:
            return None  # the cap does not bind
        else:
            low = price
        price = (low + high) / 2
    return None


def _fitting_price(new: Float64Array, added: int) -> float:
    """Return a price at which so many new units are consistent with their rewards."""
    if added == 0:
        return float(new[0]) + 1
    if added == len(new):
        return float(new[-1]) - 1
    return float(new[added - 1] + new[added]) / 2


def _next_price(trials: list[Trial], low: float, high: float) -> float:
    """Return where the line through the last two trials meets zero excess, or a safe middle."""
    last = trials[-1]
    price = (last.price + last.fitting) / 2
    if len(trials) > 1 and last.price != trials[-2].price:
        slope = (last.excess - trials[-2].excess) / (last.price - trials[-2].price)
        price = last.price - last.excess / max(slope, 1.0)
    if low < price < high:
        return price
    return (low + high) / 2 if math.isfinite(low + high) else price


NEW = -1  # the target of a unit that becomes a new global unit

SPARE_NEW = 8  # new columns offered beyond the estimate; changes the time only


@dataclass(frozen=True)
class StepProblem:
    """Rewards of one client's units."""

    existing: Float64Array  # (units, columns)
    new: Float64Array  # (at most units,), falling: of the first, second, … new unit

    @property
    def is_capped(self) -> bool:
        """Whether fewer new units are allowed than there are units."""
        return len(self.new) < len(self.existing)


def best_step(problem: StepProblem, solver: SolverName, shortcuts: Shortcuts) -> IntArray:
    """Return (units,) the targets of the highest total reward."""
    units, columns = problem.existing.shape
    assert units <= columns + len(problem.new), "no room for every unit"
    if units == 0:
        return np.zeros(0, dtype=np.int64)
    if shortcuts.prune and not problem.is_capped:
        return _pruned_step(problem, solver, shortcuts)
    return _solve_step(problem, solver, shortcuts)


def _pruned_step(problem: StepProblem, solver: SolverName, shortcuts: Shortcuts) -> IntArray:
    """Solve without the rows and columns that are in no optimum.

    As many new units are allowed as there are rows, so a row that joins a column leaves one of
    them unused, and it would rather have that one than a reward below the last. The rows dropped
    here take the first new units; the others see the rest.
    """
    useful = problem.existing >= problem.new[-1]
    rows, columns = np.flatnonzero(useful.any(axis=1)), np.flatnonzero(useful.any(axis=0))
    targets = np.full(len(useful), NEW, dtype=np.int64)
    dropped = len(useful) - len(rows)
    if dropped or len(columns) < useful.shape[1]:
        kept = problem.existing[np.ix_(rows, columns)]
        problem = StepProblem(kept, problem.new[dropped:])
    found = _solve_step(problem, solver, shortcuts)
    joined = found != NEW
    targets[rows[joined]] = columns[found[joined]]
    return targets


def _solve_step(problem: StepProblem, solver: SolverName, shortcuts: Shortcuts) -> IntArray:
    """Solve with as few new columns as prove enough.

    The best score is concave in the number of new units, so an optimum that leaves one of the
    offered new columns unused stays one when more are offered.
    """
    if not len(problem.existing):
        return np.zeros(0, dtype=np.int64)
    if shortcuts.greedy and (favourites := distinct_favourites(problem)) is not None:
        return favourites
    wanted = _wanted_new(problem)
    if shortcuts.price and len(problem.new) and can_price(solver):
        priced = solve_at_price(problem.existing, problem.new, likely=wanted)
        if priced is not None:
            return priced
    offered = _offered_new(problem, wanted) if shortcuts.reduce else len(problem.new)
    while True:
        targets = _solve_offered(problem, offered, solver)
        if offered == len(problem.new) or np.count_nonzero(targets == NEW) < offered:
            return targets
        offered = min(2 * offered, len(problem.new))


def distinct_favourites(problem: StepProblem) -> IntArray | None:
    """Return each row's best column if no two rows share one and none would rather be new."""
    if not problem.existing.shape[1]:
        return None
    favourites = problem.existing.argmax(axis=1)
    rewards = problem.existing[np.arange(len(favourites)), favourites]
    if len(problem.new) and rewards.min() < problem.new[0]:
        return None
    taken = np.zeros(problem.existing.shape[1], dtype=np.bool_)
    taken[favourites] = True
    return favourites if np.count_nonzero(taken) == len(favourites) else None


def _wanted_new(problem: StepProblem) -> int:
    """Return how many new units pay for themselves without regard to conflicts.

    The k-th one does where the k-th smallest of the rows' best rewards is below its own.
    """
    if not problem.existing.shape[1]:
        return len(problem.new)
    best = np.sort(problem.existing.max(axis=1))[: len(problem.new)]
    return int(np.count_nonzero(best < problem.new))


def _offered_new(problem: StepProblem, wanted: int) -> int:
    """Return a first guess of how many new columns suffice."""
    rows, columns = problem.existing.shape
    return int(min(max(wanted + SPARE_NEW, rows - columns + 1), len(problem.new)))


def _solve_offered(problem: StepProblem, offered: int, solver: SolverName) -> IntArray:
    """Solve with the first `offered` new units as columns beside the existing ones."""
    rows, columns = problem.existing.shape
    rewards = problem.existing
    if offered:
        rewards = np.empty((rows, columns + offered))
        rewards[:, :columns] = problem.existing
        rewards[:, columns:] = problem.new[:offered]
    found = solve(rewards, solver)
    found[found >= columns] = NEW
    return found
