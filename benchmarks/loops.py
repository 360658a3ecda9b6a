"""fedmerge against the same mathematics in plain loops, on the same clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.cases import Case, labels, run
from benchmarks.measure import Result, in_child, timed
from benchmarks.plain import plain_loops

SPEED_BAR = 50.0
CASES = (Case("VGG-9", "copies", 4), Case("char-LSTM", "independent", 4))
SLOW_CASES = (Case("VGG-9", "copies", 16), Case("VGG-9", "independent", 4))
ROUNDS = 3  # of fedmerge; the loops run once


def results() -> Iterator[Result]:
    """Yield how many times faster fedmerge is than the loops."""
    for case in CASES:
        yield from _compared(case)


def slow_results() -> Iterator[Result]:
    """Yield the same for more clients."""
    for case in SLOW_CASES:
        yield from _compared(case)


def measure(net: str, kind: str, clients: int) -> dict[str, Any]:
    """Return both times of a matching, and whether the assignments are the same."""
    session = Case(net, kind, clients).session()
    run(session)  # imports and caches
    ours, own = timed(lambda: run(session), ROUNDS)
    with plain_loops():
        theirs, plain = timed(lambda: run(session))
    return {"own": vars(own), "plain": vars(plain), "same": labels(ours) == labels(theirs)}


def _compared(case: Case) -> Iterator[Result]:
    measured = in_child(measure, threads=1, **vars(case))
    own, plain = measured["own"], measured["plain"]
    yield Result(
        f"{case.title}: plain loops ÷ fedmerge, 1 thread",
        plain["wall"] / own["wall"],
        "×",
        bar=SPEED_BAR,
        at_least=True,
        note=f"{plain['wall']:.3g} s against {own['wall']:.3g} s; "
        f"in CPU time {plain['cpu'] / own['cpu']:.3g} ×",
    )
    yield Result(
        f"{case.title}: same assignments as the plain loops",
        float(measured["same"]),
        "",
        bar=1,
        at_least=True,
    )
