"""Which bars one-shot merges meet, and how well distance from the ensemble predicts a merge."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.measure import Result
from benchmarks.oneshot_runs import Considered, Outcome
from benchmarks.oneshot_suites import (
    ALONE,
    BARS,
    DEVELOPMENT,
    OURS,
    PLAIN,
    SMALL_RESNET20,
    Bar,
    Merging,
    Source,
    measure_of,
)

Runs = Mapping[Merging, Outcome]

WITH: Mapping[Source, str] = {
    "none": "",
    "default": "without data",
    "data": "with 1,000 unlabelled inputs",
}
TRIED: Mapping[str, str] = dict.fromkeys(
    ("cifar_resnet20", SMALL_RESNET20), "[what was tried](#what-was-tried-on-deep-nets)"
)
NEAR = 1.0  # points of accuracy by which candidates are not told apart


def outcomes(runs: Runs, case: str, method: str, probes: Source | None = None) -> list[Outcome]:
    """Return all seeds of a method, in their order."""
    found = [m for m in runs if (m.case, m.method) == (case, method)]
    chosen = [m for m in found if probes is None or m.probes == probes]
    return [runs[merging] for merging in sorted(chosen, key=lambda merging: merging.seed)]


def bars(runs: Runs) -> Iterator[Result]:
    """Yield the mean over seeds of every bar that was run, next to the bar and to the rival's."""
    for bar in BARS:
        found = list(_values(runs, bar, OURS))
        if found:
            rival = list(_values(runs, bar, PLAIN))
            told = f"plain distillation: {statistics.mean(rival):.2f}" if rival else ""
            yield Result(
                title(bar), round(statistics.mean(found), 2), bar=bar.value, unit=_unit(bar),
                at_least=True, note="; ".join(filter(None, (told, TRIED.get(bar.case, "")))),
            )  # fmt: skip


def _values(runs: Runs, bar: Bar, method: str) -> Iterator[float]:
    """Yield what a bar asks for, of every seed of a method; more is better."""
    sign = 1 if measure_of(bar.case) == "accuracy" else -1
    for outcome in outcomes(runs, bar.case, method, bar.probes):
        score = outcome.scores["merge"]
        if bar.of in ("pull", "gain"):
            value = outcome.pull if bar.of == "pull" else outcome.gain
            if value is not None:
                yield value
        elif bar.of == "over the best client":
            alone = outcomes(runs, bar.case, ALONE)
            yield sign * (score - statistics.mean(own.scores["best client"] for own in alone))
        elif bar.of == "over plain distillation":
            rivals = outcomes(runs, bar.case, PLAIN)
            yield sign * (score - statistics.mean(own.scores["merge"] for own in rivals))
        else:
            yield score


def _unit(bar: Bar) -> str:
    if bar.of in ("pull", "gain"):
        return bar.of
    return "bits" if measure_of(bar.case) == "bits" else "points" if bar.of else "%"


def title(bar: Bar) -> str:
    """Return what a bar is about."""
    return ", ".join(filter(None, (bar.case, WITH[bar.probes], bar.of)))


def not_run(runs: Runs) -> list[str]:
    """Return the cases that have bars and that nothing was run for."""
    missing = (f"{b.case}, {WITH[b.probes]}" for b in BARS if not list(_values(runs, b, OURS)))
    return list(dict.fromkeys(missing))


@dataclass(frozen=True)
class Foresight:
    """How well the candidates of some merges were chosen among and put in order."""

    merges: int
    right: int  # merges whose candidate nearest to the ensemble is the best on test data
    lost: tuple[float, ...]  # points of each merge to its best candidate
    pairs: int  # of candidates of a merge whose accuracies are not near
    ordered: int  # pairs that distance puts in the order of their accuracies


def foresight(found: Sequence[Outcome]) -> Foresight:
    """Compare distance with accuracy over all candidates of every merge that had a choice."""
    choices = [outcome for outcome in found if len(outcome.considered) > 1]
    lost = tuple(
        max(c.score for c in outcome.considered) - outcome.scores["merge"] for outcome in choices
    )
    pairs = [
        pair
        for outcome in choices
        for pair in combinations(outcome.considered, 2)
        if abs(pair[0].score - pair[1].score) >= NEAR
    ]
    return Foresight(
        merges=len(choices),
        right=sum(points == 0 for points in lost),
        lost=lost,
        pairs=len(pairs),
        ordered=sum((_rank(a) > _rank(b)) == (a.score > b.score) for a, b in pairs),
    )


def forewarned(runs: Runs, probes: Source) -> Counter[tuple[bool, bool]]:
    """Count merges by whether fedmerge warned that they be, and whether they are, below a client.

    Truth is the best client's test score.
    """
    return Counter(
        (any(map(_doubts, outcome.warnings)), _is_below(runs, merging, outcome))
        for merging, outcome in runs.items()
        if merging.probes == probes and merging.method == OURS and merging.case not in DEVELOPMENT
    )


def _doubts(warning: str) -> bool:
    """Return whether a warning says that a merge is, or may be, worse than a client."""
    is_doubt = warning.startswith("the merge ") and "worse than" in warning
    return is_doubt or warning.startswith("the result is client")


def _is_below(runs: Runs, merging: Merging, outcome: Outcome) -> bool:
    """Return whether a merge is worse on test data than the best of its clients."""
    alone = {m.seed: o for m, o in runs.items() if (m.case, m.method) == (merging.case, ALONE)}
    clients = alone.get(merging.seed) or next(iter(alone.values()))  # strangers have no seed
    behind = clients.scores["best client"] - outcome.scores["merge"]
    return behind > 0 if measure_of(merging.case) == "accuracy" else behind < 0


def _rank(candidate: Considered) -> float:
    """Return what fedmerge orders candidates by."""
    return float("-inf") if candidate.distance is None else -candidate.distance
