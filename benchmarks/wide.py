"""One very wide group: how long exact matching takes, and on what."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.measure import Cost, Result, in_child, timed
from fedmerge.matching import (
    SearchOptions,
    Shortcuts,
    SolverName,
    StepProblem,
    UnitFeatures,
    best_step,
    match_units,
    prior_at_threshold,
    sweeps,
)
from fedmerge.values import FloatArray, IntArray

UNITS, FEATURES, CLIENTS = 8192, 4096, 4
SWEEPS = 5  # as many as the paper's code makes
NOISE = 0.1  # of a copy, relative to the weights


@dataclass(frozen=True)
class Kind:
    """How the clients resemble each other, and how they are matched."""

    is_copy: bool
    threshold: float = 0.5
    may_grow: bool = True


KINDS: Mapping[str, Kind] = {
    "copies": Kind(is_copy=True),
    "nothing matches": Kind(is_copy=False),
    "independent, as wide as one client": Kind(is_copy=False, may_grow=False),
}


def slow_results() -> Iterator[Result]:
    """Yield what one group of 8,192 units with 4,096 features of 4 clients takes."""
    for kind in KINDS:
        measured = in_child(
            measure, threads=None, kind=kind, units=UNITS, features=FEATURES, clients=CLIENTS
        )
        yield Result(
            f"{CLIENTS} clients × {UNITS:,} units × {FEATURES:,} features, {kind}",
            measured["wall"],
            "s",
            note=f"CPU {measured['cpu']:.3g} s; {measured['steps']} assignment problems "
            f"{measured['solving']:.3g} s; {measured['width']:,} global units, "
            f"scatter {measured['scatter']:.3f}",
        )


def measure(kind: str, units: int, features: int, clients: int) -> dict[str, Any]:
    """Return the cost of one group, that of its assignment problems, and what came out."""
    settings = KINDS[kind]
    made = list(_clients(units, features, clients, is_copy=settings.is_copy))
    steps, started = Steps(), time.perf_counter()

    def show(share: float) -> None:
        seconds = time.perf_counter() - started
        print(f"  {kind}: {share:.0%}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def work() -> Any:
        return match_units(
            made,
            prior_at_threshold(settings.threshold, 1.0, gamma=1.0),
            SearchOptions(sweeps=SWEEPS),
            max_width=None if settings.may_grow else units,
            rng=np.random.default_rng(0),
            progress=show,
        )

    with steps.watching():
        matching, cost = timed(work)
    return {
        "wall": cost.wall,
        "cpu": cost.cpu,
        "solving": steps.cost.wall,
        "steps": steps.count,
        "width": matching.width,
        "scatter": matching.scatter,
    }


class Steps:
    """The assignment problems of a matching, counted, and their cost."""

    def __init__(self) -> None:
        self.count, self.cost = 0, Cost()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the steps of every matching inside."""
        with mock.patch.object(sweeps, "best_step", self._best_step):
            yield

    def _best_step(
        self, problem: StepProblem, solver: SolverName, shortcuts: Shortcuts
    ) -> IntArray:
        found, cost = timed(lambda: best_step(problem, solver, shortcuts))
        self.count, self.cost = self.count + 1, self.cost + cost
        targets: IntArray = found
        return targets


def _clients(units: int, features: int, clients: int, *, is_copy: bool) -> Iterator[UnitFeatures]:
    """Yield (units, features) of variance 1: permuted noisy copies, or independent ones."""
    original = _normal(units, features, seed=0)
    ties = np.zeros((units, 0), dtype=np.float32)
    for seed in range(1, clients + 1):
        weights = _normal(units, features, seed=seed)
        if is_copy:
            order = np.random.default_rng(seed).permutation(units)
            weights = original[order] + np.float32(NOISE) * weights
        yield UnitFeatures(weights, ties)


def _normal(rows: int, columns: int, *, seed: int) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
