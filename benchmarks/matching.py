"""One matching of the paper's VGG-9 against its floor, measured in the same run.

The floor of a step is one float32 matrix product of its shape and one call of the solver on its
rewards, with as many new columns as the answer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

from benchmarks.measure import Result, best_of
from benchmarks.vgg import independent, noisy_copies, vgg9_shapes
from fedmerge import MatchOptions
from fedmerge.matching import steps, visits
from fedmerge.matching.products import ClientUnits
from fedmerge.matching.solvers import solve
from fedmerge.matching.steps import NEW, StepProblem
from fedmerge.matching.values import Shortcuts, SolverName
from fedmerge.types.arrays import Float64Array, IntArray
from fedmerge.workflow.match import match

SWEEPS = 5
CASES = {
    "permuted noisy copies": MatchOptions(max_growth="none", sweeps=SWEEPS),
    "independent nets at threshold 0.03": MatchOptions(
        max_growth="none", sweeps=SWEEPS, match_threshold=0.03
    ),
}


def results(clients: int) -> Iterator[Result]:
    """Yield the time of a matching and its ratio to the floor."""
    shapes = vgg9_shapes()
    for name, options in CASES.items():
        is_copy = "copies" in name
        nets = [independent(shapes, seed) for seed in range(clients)]
        states = noisy_copies(shapes, clients) if is_copy else nets
        floor = Floor()
        with floor.recording():
            match(states, options)
        taken = best_of(2, lambda: match(states, options))  # noqa: B023, called at once
        what = f"match VGG-9, {clients} clients, {name}"
        yield Result(what, taken, "s")
        yield Result(f"{what} ÷ floor", taken / best_of(2, floor.run), "×", bar=2.0)


class Floor:
    """The products and solver calls of a matching, to be run again by themselves."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def run(self) -> None:
        """Do the work again."""
        for call in self._calls:
            call()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every step of the matchings inside."""
        step, rewards = steps.best_step, visits.Visitor._rewards

        def kept_step(problem: StepProblem, solver: SolverName, shortcuts: Shortcuts) -> IntArray:
            targets = step(problem, solver, shortcuts)
            used = int(np.count_nonzero(targets == NEW))
            self._keep_solver_call(problem, used + 1, solver)
            return targets

        def kept_rewards(visitor: visits.Visitor, client: int, view: visits.View) -> Float64Array:
            self._keep_product(visitor._clients[client], len(view.columns))
            return rewards(visitor, client, view)

        with (
            mock.patch.object(visits, "best_step", kept_step),
            mock.patch.object(visits.Visitor, "_rewards", kept_rewards),
        ):
            yield

    def _keep_solver_call(self, problem: StepProblem, offered: int, solver: SolverName) -> None:
        columns = [problem.existing] + [
            np.full((len(problem.existing), 1), reward) for reward in problem.new[:offered]
        ]
        matrix = np.hstack(columns)
        self._calls.append(lambda: solve(matrix, solver))

    def _keep_product(self, units: ClientUnits, columns: int) -> None:
        left = units.features.weights.astype(np.float32, copy=False)
        right = np.ones((columns, left.shape[1]), dtype=np.float32)
        self._calls.append(lambda: left @ right.T)
