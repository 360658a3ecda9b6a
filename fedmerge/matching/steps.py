"""One step of the search: the best injective assignment of a client's units, new units included."""

from dataclasses import dataclass

import numpy as np

from fedmerge.matching.prices import solve_at_price
from fedmerge.matching.solvers import can_price, solve
from fedmerge.matching.values import Shortcuts, SolverName
from fedmerge.types.arrays import Float64Array, IntArray

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
