"""The floor of a matching: its matrix products and its assignment problems, and nothing else.

A step is a visit to a client after something changed. Its floor is one float32 product of its
shape, every unit with every global unit, and one call of the solver on its rewards, with one new
column more than the answer uses. Beside it stands what the matching itself makes of it: products
with the global units that changed since the client's last step, in steps that bounds could not
spare, and its own way to solve them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.measure import Cost, cost_of, timed
from fedmerge.matching import (
    NEW,
    GroupMatching,
    Shortcuts,
    SolverName,
    StepProblem,
    UnitFeatures,
    best_step,
    match_units,
    solve,
    sweeps,
)
from fedmerge.merging import by_weights
from fedmerge.values import Float64Array, FloatArray, IntArray

REPEATS = 3  # of every product and solver call; the least counts


class Floor:
    """Costs of the products and solver calls of the matchings that run while it watches.

    They are done again on the spot, on the same matrices, so that nothing has to be kept.
    """

    def __init__(self, repeats: int = REPEATS, *, every_step: bool = True) -> None:
        self._repeats, self._every_step = repeats, every_step
        self._shortcuts = Shortcuts(bound=not every_step)
        self.steps = 0  # that had anything to compare
        self.products = Cost()  # whole: units × features × all global units
        self.renewed = Cost()  # only with global units that changed
        self.solver = Cost()  # one call per step
        self.own_solver = Cost()  # as the matching itself solves its steps
        self._features = 0
        self._seen: dict[int, list[IntArray]] = {}  # all clients' homes at a client's last visit

    @property
    def total(self) -> Cost:
        """The floor: one whole product and one solver call per step."""
        return self.products + self.solver

    @property
    def own(self) -> Cost:
        """The products and solutions that the matching itself needs."""
        return self.renewed + self.own_solver

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the steps of every matching inside."""
        rewards = sweeps.Visitor._rewards

        def watched(visitor: sweeps.Visitor, client: int, view: sweeps.View) -> Float64Array:
            self._note_renewed(visitor, client, view)
            return rewards(visitor, client, view)

        with (
            mock.patch.object(by_weights, "match_units", self.match_units),
            mock.patch.object(sweeps, "best_step", self._best_step),
            mock.patch.object(sweeps.Visitor, "_rewards", watched),
        ):
            yield

    def match_units(self, units: Sequence[UnitFeatures], *rest: Any, **named: Any) -> GroupMatching:
        """Match one group, knowing how long its features are."""
        self._features = units[0].length
        self._seen = {}
        return match_units(units, *rest, **named, shortcuts=self._shortcuts)

    def _best_step(
        self, problem: StepProblem, solver: SolverName, shortcuts: Shortcuts
    ) -> IntArray:
        units, columns = problem.existing.shape
        if not columns:  # the first client: nothing to compare with
            return best_step(problem, solver, shortcuts)
        targets, cost = timed(lambda: best_step(problem, solver, shortcuts), self._repeats)
        self.steps += 1
        self.own_solver += cost
        if self._every_step:
            matrix = _with_new(problem, int(np.count_nonzero(targets == NEW)) + 1)
            self.solver += cost_of(lambda: solve(matrix, solver), self._repeats)
            self.products += product_cost(units, self._features, columns, self._repeats)
        found: IntArray = targets
        return found

    def _note_renewed(self, visitor: sweeps.Visitor, client: int, view: sweeps.View) -> None:
        homes = visitor._slots.homes
        before = self._seen.get(client)
        self._seen[client] = [places.copy() for places in homes]
        renewed = len(view.columns)
        if before is not None:
            renewed = int(np.isin(view.columns, _touched(before, homes, client)).sum())
        self.renewed += product_cost(len(homes[client]), self._features, renewed, self._repeats)


def _touched(before: Sequence[IntArray], now: Sequence[IntArray], client: int) -> IntArray:
    """Return the slots that a unit of another client left or joined in between."""
    slots = [np.zeros(0, dtype=np.int64)]
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        if number != client:
            slots += [old[old != new], new[old != new]]
    return np.concatenate(slots)


def _with_new(problem: StepProblem, offered: int) -> Float64Array:
    """Return the rewards with so many new units as columns beside the existing ones."""
    new = problem.new[:offered]
    return np.hstack([problem.existing, np.broadcast_to(new, (len(problem.existing), len(new)))])


@cache
def product_cost(units: int, features: int, columns: int, repeats: int) -> Cost:
    """Return the least cost of one float32 product (units, features) · (columns, features)ᵀ.

    Numpy and torch bring libraries of their own; the faster one counts.
    """
    if not units * features * columns:
        return Cost()
    left, right = _numbers(units, features), _numbers(columns, features)
    tensors = torch.from_numpy(left), torch.from_numpy(right)
    by_numpy = cost_of(lambda: left @ right.T, repeats)
    return by_numpy.least(cost_of(lambda: tensors[0] @ tensors[1].T, repeats))


def _numbers(rows: int, columns: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
