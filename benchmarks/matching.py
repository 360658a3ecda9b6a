"""One matching at a fixed threshold against its floor, and how its time grows with the clients."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.cases import Case, run
from benchmarks.floor import Floor
from benchmarks.measure import Cost, Result, cost_of, free_memory, in_child
from benchmarks.nets import NETS
from fedmerge.merging import Session

FLOOR_BAR = 2.0
GROWTH_BAR = 1.1
BARRED = (Case("VGG-9", "copies", 16), Case("VGG-9", "independent", 16))
ROUNDS = 3  # of matching and floor in turns; the least of each counts
CASES = (
    *(Case("VGG-9", "copies", clients) for clients in (4, 8, 16, 32)),
    *(Case("VGG-9", "independent", clients) for clients in (4, 8, 16)),
    Case("VGG-9", "nothing matches", 4),
    Case("char-LSTM", "copies", 8),
    Case("char-LSTM", "independent", 8),
    Case("char-LSTM", "nothing matches", 8),
)
SLOW_CASES = (
    Case("VGG-9", "independent", 32),
    Case("VGG-9", "nothing matches", 8),
    Case("VGG-9", "nothing matches", 16),
    Case("VGG-9", "nothing matches", 32),
    Case("char-LSTM", "copies", 66),
    Case("char-LSTM", "independent", 66),
    Case("char-LSTM", "nothing matches", 66),
)
SLOW_ROUNDS = 1
FLOAT32, FLOAT64 = 4, 8  # bytes
ROOM, COPIES = 1.5, 2  # growth of other cases; how often features and sums exist at a time


def results() -> Iterator[Result]:
    """Yield every quick case at one thread and at all cores, and the growth with the clients."""
    per_step: dict[Case, float] = {}
    for case in CASES:
        measured = in_child(measure, threads=1, **vars(case), rounds=ROUNDS)
        per_step[case] = measured["own_cpu"] / measured["steps"]
        yield from _shown(case, measured, "1 thread")
        if case in BARRED:
            measured = in_child(measure, threads=None, **vars(case), rounds=ROUNDS)
            yield from _shown(case, measured, f"{os.cpu_count()} cores")
    few, many = (Case("VGG-9", "copies", clients) for clients in (4, 32))
    yield Result(
        "VGG-9 copies, CPU time per matching step: 32 ÷ 4 clients",
        per_step[many] / per_step[few],
        "×",
        bar=GROWTH_BAR,
    )


def slow_results() -> Iterator[Result]:
    """Yield the cases that take minutes or gigabytes, as far as there is memory for them."""
    for case in SLOW_CASES:
        needed, free = memory_needed(case), free_memory()
        if needed > free:
            note = f"not run: only {free / 1e9:.0f} GB are free"
            yield Result(f"{case.title}: memory needed", needed / 1e9, "GB", note=note)
        else:
            measured = in_child(measure, threads=None, **vars(case), rounds=SLOW_ROUNDS)
            yield from _shown(case, measured, f"{os.cpu_count()} cores")


def measure(net: str, kind: str, clients: int, rounds: int) -> dict[str, Any]:
    """Return the least costs of a matching and of its floor, measured in turns."""
    session = Case(net, kind, clients).session()
    run(Case(net, kind, 2).session())  # imports and caches
    own, floors, needed = Cost(math.inf, math.inf), [], []
    for _ in range(rounds):
        own = own.least(cost_of(lambda: run(session)))
        floors.append(watched(session, repeats=rounds, every_step=True))
        needed.append(watched(session, repeats=rounds, every_step=False).own)
    floor = min(floors, key=lambda floor: floor.total.wall)
    return {
        "own_wall": own.wall,
        "own_cpu": own.cpu,
        "floor_wall": floor.total.wall,
        "floor_cpu": floor.total.cpu,
        "products_wall": floor.products.wall,
        "needed_wall": min(cost.wall for cost in needed),
        "steps": floor.steps,
    }


def watched(session: Session, *, repeats: int, every_step: bool) -> Floor:
    """Return what a matching's steps cost: every one of them, or those that bounds don't spare."""
    floor = Floor(repeats, every_step=every_step)
    with floor.watching():
        run(session)
    return floor


def memory_needed(case: Case) -> float:
    """Return a rough number of bytes for clients, features and sums of the largest group.

    Where nothing matches, inputs and global units of a layer are those of all clients.
    """
    net = NETS[case.net]()
    spread = case.clients if case.kind == "nothing matches" else ROOM
    largest = max(map(math.prod, net.shapes.values()))
    features = FLOAT32 * case.clients * largest * spread
    sums = FLOAT64 * largest * spread * spread
    return FLOAT32 * case.clients * net.numbers + COPIES * (features + sums)


def _shown(case: Case, measured: Mapping[str, Any], threads: str) -> Iterator[Result]:
    title = f"{case.title}, {threads}"
    own = measured["own_wall"]
    share = measured["products_wall"] / measured["floor_wall"]
    yield Result(
        title,
        own,
        "s",
        note=f"CPU {measured['own_cpu']:.3g} s, {measured['steps']} steps; "
        f"floor {measured['floor_wall']:.3g} s, {share:.0%} of it products",
    )
    yield Result(
        f"{title} ÷ floor",
        own / measured["floor_wall"],
        "×",
        bar=FLOOR_BAR if case in BARRED else None,
        note=f"in CPU time {measured['own_cpu'] / measured['floor_cpu']:.2f} ×; "
        f"÷ what its own steps need {own / measured['needed_wall']:.2f} ×",
    )
