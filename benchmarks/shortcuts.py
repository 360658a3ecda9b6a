"""What every saving of the search gains, and that none of them changes an assignment.

Each one is measured twice: what the matching costs without it while all others stay, and what it
saves alone when all others are off. Without any, the search computes every product in every visit,
makes all sweeps, and gives scipy all new columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.cases import Case, labels, run
from benchmarks.measure import Cost, Result, in_child, timed
from fedmerge.matching import Shortcuts, SolverName, match_units
from fedmerge.merging import Session, by_weights

CASES = (
    Case("VGG-9", "copies", 8),
    Case("VGG-9", "independent", 2),
    Case("VGG-9", "independent", 4),
    Case("char-LSTM", "nothing matches", 8),
)
ROUNDS = 2
NO_SHORTCUTS = Shortcuts(**{field.name: False for field in fields(Shortcuts)})
FIXED_SOLVERS: tuple[SolverName, ...] = ("scipy", "lapjv", "lapsolver")
NAMES: Mapping[str, str] = {
    "reuse": "stale-column reuse",
    "skip": "skipping unchanged clients",
    "bound": "proving by bounds that a client stays",
    "stop": "early stop",
    "pair": "no sweeps over pairs",
    "prune": "row and column pruning",
    "reduce": "reduced new columns",
    "price": "one price for new units",
    "greedy": "distinct favourites without a solver",
}


@dataclass(frozen=True)
class Setting:
    """Which savings are on, and the solver."""

    shortcuts: Shortcuts
    solver: SolverName

    def without(self, name: str) -> Setting:
        """Return the setting with one saving off; the choice of solver counts as one."""
        return self._with(name, on=False)

    def only(self, name: str) -> Setting:
        """Return the setting with one saving on."""
        return self._with(name, on=True)

    def _with(self, name: str, *, on: bool) -> Setting:
        return replace(self, shortcuts=replace(self.shortcuts, **{name: on}))


ALL_ON, ALL_OFF = Setting(Shortcuts(), "auto"), Setting(NO_SHORTCUTS, "scipy")


def settings() -> dict[str, Setting]:
    """Return every setting that is measured, by its name."""
    found = {"all": ALL_ON, "none": ALL_OFF}
    for name in NAMES:
        found[f"-{name}"] = ALL_ON.without(name)
        found[f"+{name}"] = ALL_OFF.only(name)
    # `reduce` has nothing to do where new units have a price instead of columns.
    found["-price"] = ALL_ON.without("price")
    found["-reduce"] = found["-price"].without("reduce")
    for solver in FIXED_SOLVERS:
        found[f"-{solver}"] = replace(ALL_ON, solver=solver)
    found["+auto"] = replace(ALL_OFF, solver="auto")
    return found


def results() -> Iterator[Result]:
    """Yield the gain of every saving, and how many settings gave other assignments."""
    for case in CASES:
        yield from shown(case.title, in_child(measure, threads=1, **vars(case), rounds=ROUNDS))


def measure(net: str, kind: str, clients: int, rounds: int) -> dict[str, Any]:
    """Return the CPU seconds of every setting, and which ones gave other assignments."""
    session = Case(net, kind, clients).session()
    expected = labels(run(session))
    costs = dict.fromkeys(settings(), Cost(math.inf, math.inf))
    different = set()
    for _ in range(rounds):  # in turns, so that a change of the machine's speed meets them all
        for name, setting in settings().items():
            with using(setting.shortcuts):
                solution, cost = timed(partial(run, with_solver(session, setting.solver)))
            costs[name] = costs[name].least(cost)
            if labels(solution) != expected:
                different.add(name)
    seconds = {name: cost.cpu for name, cost in costs.items()}
    return {"seconds": seconds, "different": sorted(different)}


@contextmanager
def using(shortcuts: Shortcuts) -> Iterator[None]:
    """Match with these savings whatever a workflow matches inside."""
    with mock.patch.object(by_weights, "match_units", partial(match_units, shortcuts=shortcuts)):
        yield


def with_solver(session: Session, solver: SolverName) -> Session:
    """Return the session with another solver."""
    return replace(session, options=replace(session.options, solver=solver))


def shown(title: str, measured: Mapping[str, Any]) -> Iterator[Result]:
    """Yield the results of one case."""
    seconds = measured["seconds"]
    yield Result(f"{title}: CPU time with all savings", seconds["all"], "s")
    yield Result(f"{title}: none ÷ all", seconds["none"] / seconds["all"], "×")
    for name, what in NAMES.items():
        others = seconds["-price"] if name == "reduce" else seconds["all"]
        yield _gain(
            title, what, seconds[f"-{name}"] / others, seconds["none"] / seconds[f"+{name}"]
        )
    for solver in FIXED_SOLVERS:
        yield _gain(
            title,
            f"solver chosen by shape, against {solver}",
            seconds[f"-{solver}"] / seconds["all"],
            seconds["none"] / seconds["+auto"] if solver == "scipy" else None,
        )
    yield Result(
        f"{title}: settings of {len(seconds)} with other assignments",
        len(measured["different"]),
        "",
        bar=0,
        note=", ".join(measured["different"]),
    )


def _gain(title: str, what: str, without: float, alone: float | None) -> Result:
    note = "" if alone is None else f"alone {alone:.2f} ×"
    return Result(f"{title}: gain of {what}", without, "×", note=note)
