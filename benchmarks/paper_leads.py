"""How far FedMA is ahead of FedAvg by rounds and by bytes, for the page of `benchmarks.paper`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.measure import Result
from benchmarks.paper_runs import Outcome, Point
from benchmarks.paper_suites import Experiment

Seeds = Sequence[tuple[Experiment, Outcome]]
Methods = Mapping[str, Seeds]  # name → its seeds

FEDMA, FEDAVG = "FedMA, independent", "FedAvg, independent"
BARS: Mapping[int, float] = {4: 3.0, 8: 2.0}  # round → points that FedMA must be ahead
MOST_BYTES = round(1 / 3, 3)  # of FedAvg's
DECIMALS = 2  # of points


def leads(methods: Methods, *, judged: bool) -> list[Result]:
    """Return how far FedMA is ahead after its passes, its bytes, and its lead at these bytes.

    The mean over seeds has a bar; the median shows whether one seed alone decides.
    """
    ours, theirs = methods[FEDMA], methods[FEDAVG]
    passes = sorted({point.round for _, outcome in ours for point in outcome.points})
    results: list[Result] = []
    for number in passes:
        bar = BARS.get(number) if judged else None
        what = f"FedMA ahead of FedAvg, both independent, at round {number}"
        results += _lead(what, by_seed(ours, number), by_seed(theirs, number), bar)
    moved = [megabytes(seeds, passes[-1]) for seeds in (ours, theirs)]
    what = f"FedMA's bytes ÷ FedAvg's, {passes[-1]} rounds"
    results.append(Result(what, moved[0] / moved[1], "", bar=MOST_BYTES if judged else None))
    rivals = _chosen(theirs, lambda point: point.megabytes <= moved[0])
    number = max((point.round for point in rivals.values()), default=0)
    if number:
        what = f"FedMA at round {passes[-1]} ahead of what FedAvg has for its bytes, round {number}"
        results += _lead(what, by_seed(ours, passes[-1]), by_seed(theirs, number), None)
    return results


def by_seed(seeds: Seeds, number: int) -> dict[int, float]:
    """Return every seed's accuracy after a round."""
    found = _chosen(seeds, lambda point: point.round == number)
    return {seed: point.accuracy for seed, point in found.items()}


def megabytes(seeds: Seeds, number: int) -> float:
    """Return the mean over seeds of what was moved until a round."""
    found = _chosen(seeds, lambda point: point.round == number)
    return statistics.mean(point.megabytes for point in found.values())


def _lead(
    what: str, ours: Mapping[int, float], theirs: Mapping[int, float], bar: float | None
) -> Iterator[Result]:
    """Yield the mean and the median over the seeds that both have."""
    found = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    note = "by seed: " + ", ".join(f"{lead:.1f}" for lead in found)
    mean, median = (round(f(found), DECIMALS) for f in (statistics.mean, statistics.median))
    yield Result(what, mean, "points", bar=bar, at_least=True, note=note)
    if len(found) > 1:
        yield Result("the same, median", median, "points", bar=bar, at_least=True)


def _chosen(seeds: Seeds, fits: Callable[[Point], bool]) -> dict[int, Point]:
    """Return every seed's last point that fits, of those that have one."""
    found = {e.seed: [p for p in outcome.points if fits(p)] for e, outcome in seeds}
    return {seed: points[-1] for seed, points in found.items() if points}
