"""The page of the paper's comparison says what its results say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper
from benchmarks.paper_leads import MOST_BYTES
from benchmarks.paper_page import page, plots
from benchmarks.paper_suites import experiments

ROOT = Path(__file__).parents[3]
RESULTS = paper.read_results(ROOT / "benchmarks" / "paper-results.json")
DOCS = ROOT / "docs"
SEEDS = {0, 1, 2}

Claim = Callable[[], bool]


def runs(
    dataset: str, part: str = "main", init: str = "independent", **changes: Any
) -> paper.Results:
    """Return a method's runs, FedMA's unless said otherwise, by their settings."""
    changes = {"method": "fedma", "init": init, **changes}
    methods = [changes["method"]]
    return {
        e: o
        for e, o in RESULTS.items()
        if e.dataset == dataset
        and e
        in experiments(dataset, e.sha256, [e.seed], parts=[part], methods=methods, changes=changes)
    }


def accuracy(number: int, dataset: str, **settings: Any) -> dict[int, float]:
    """Return every seed's accuracy after a round."""
    found = runs(dataset, **settings).items()
    return {e.seed: p.accuracy for e, o in found for p in o.points if p.round == number}


def bytes_of(dataset: str, **settings: Any) -> float:
    """Return the megabytes of the first seed."""
    return next(iter(runs(dataset, **settings).values())).points[-1].megabytes


def leads(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return how far one is ahead, by seed."""
    assert ours.keys() == theirs.keys() == SEEDS
    return [ours[seed] - theirs[seed] for seed in sorted(SEEDS)]


def tried(number: int = 3, dataset: str = "shakespeare", **changes: Any) -> dict[int, float]:
    return accuracy(number, dataset, on="validation", rounds=number, **changes)


def fedma_and_fedavg(number: int, dataset: str, **settings: Any) -> list[float]:
    return leads(
        accuracy(number, dataset, **settings),
        accuracy(number, dataset, method="fedavg", **settings),
    )


def rivals_of_shared_starts() -> bool:
    shared = {"method": "fedavg", "init": "shared"}
    both = ((accuracy(k, "mnist"), accuracy(k, "mnist", **shared)) for k in (4, 8))
    return all(lead < 0 for ours, theirs in both for lead in leads(ours, theirs))


def lead_with(epochs: int, **settings: Any) -> float:
    """Return the lead after one pass of the seed that has all numbers of local epochs."""
    ours, theirs = (
        accuracy(4, "mnist", epochs=epochs, method=method, **settings)
        for method in ("fedma", "fedavg")
    )
    return ours[0] - theirs[0]


def shrinking_lead() -> bool:
    short, long = (lead_with(epochs, part="epochs", rounds=4) for epochs in (1, 10))
    return short > lead_with(3) > long


def lstm_by_bytes() -> bool:
    """Whether FedMA is ahead of the last round of FedAvg that needs no more bytes."""
    ours, theirs = (next(iter(runs("shakespeare", method=m).values())) for m in ("fedma", "fedavg"))
    moved = ours.points[-1].megabytes
    number = max(p.round for p in theirs.points if p.megabytes <= moved)
    rival = accuracy(number, "shakespeare", method="fedavg")
    return min(leads(accuracy(6, "shakespeare"), rival)) > 0


def mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values)


VALIDATED = {"on": "validation"}
CLAIMS: Mapping[str, Claim] = {
    "FedAvg itself is the method to beat": rivals_of_shared_starts,
    "FedMA is ahead in no seed": lambda: all(
        max(fedma_and_fedavg(k, "mnist", part="initialisation")) <= 0 for k in (4, 8)
    ),
    "both\ngain, and the longer clients train, the less FedMA is ahead": shrinking_lead,
    "In every seed FedMA is behind FedAvg by rounds": lambda: all(
        max(fedma_and_fedavg(k, "shakespeare")) < 0 for k in (3, 6)
    ),
    "and ahead of it by bytes": lstm_by_bytes,
    "better in every seed than without (`refine 0`)": lambda: (
        min(leads(tried(), tried(refine=0))) > 0
    ),
    "more than three times (`refine 10`) brings no more": lambda: (
        mean(tried(refine=10)) - mean(tried()) < 0.1
    ),
    "Better in every seed,\n  by little in one": lambda: (
        min(leads(tried(attempts=("rotation",)), tried())) > 0
    ),
    "one byte each, no gain": lambda: mean(tried(attempts=("signs",))) < mean(tried()) + 0.1,
    "better in every seed, for a third more bytes": lambda: (
        min(leads(tried(max_growth=2.0), tried())) > 0
        and round(bytes_of("shakespeare", **VALIDATED, rounds=3, max_growth=2.0)
        / bytes_of("shakespeare", **VALIDATED, rounds=3), 1) == 1.3
    ),
    "three times as long: better in every seed": lambda: (
        min(leads(tried(last_epochs_factor=3), tried())) > 0
    ),
    "so that a pass has two\n  rounds: worse in every seed": lambda: (
        max(leads(tried(2, keep=("encoder.weight",)), tried())) < 0
    ),
    "is better at round 4 on MNIST, no better at round 8": lambda: (
        accuracy(4, "mnist", **VALIDATED, max_growth=1.5)[0] > accuracy(4, "mnist", **VALIDATED)[0]
        and accuracy(8, "mnist", **VALIDATED, max_growth=1.5)[0]
        <= accuracy(8, "mnist", **VALIDATED)[0]
    ),
    "costs more than a third of FedAvg's bytes; hence 1.25": lambda: (
        bytes_of("mnist", **VALIDATED, max_growth=1.5) / bytes_of("mnist", method="fedavg")
        > MOST_BYTES
    ),
    "are not better for\n  LeNet": lambda: all(
        accuracy(k, "mnist", **VALIDATED, last_rate_factor=0.1, last_epochs_factor=3)[0]
        <= accuracy(k, "mnist", **VALIDATED)[0]
        for k in (4, 8)
    ),
    "level with FedAvg in one seed and ahead in the other; by bytes it is far ahead": lambda: (
        abs(accuracy(9, "cifar10")[0] - accuracy(9, "cifar10", method="fedavg")[0]) < 1
        and accuracy(9, "cifar10")[1] - accuracy(9, "cifar10", method="fedavg")[1] > 2
        and all(
            accuracy(9, "cifar10")[k] - accuracy(1, "cifar10", method="fedavg")[k] > 10
            for k in (0, 1)
        )
    ),
    "with PyTorch's the bars on rounds are missed": lambda: (
        max(fedma_and_fedavg(8, "mnist", part="initialisation")) < 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_the_page_concludes_is_in_its_results(claim: str) -> None:
    assert claim in page(RESULTS)
    assert CLAIMS[claim]()


def test_the_page_and_its_plots_are_those_of_the_results() -> None:
    """All but the machine, which is that of whoever writes the page."""

    def told(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("Run on: ")]

    assert told((DOCS / "paper.md").read_text(encoding="utf-8")) == told(page(RESULTS))
    for name, picture in plots(RESULTS).items():
        assert (DOCS / f"paper-{name}.svg").read_text(encoding="utf-8") == picture
