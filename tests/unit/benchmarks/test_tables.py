"""Results become tables, and every page has a place for each of its tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import many_clients_page, oneshot_page, page, paper_page
from benchmarks.many_clients_page import MATCH, OVER_RAY, RETRAIN, Line, line
from benchmarks.many_clients_runs import Measured
from benchmarks.many_clients_sites import Scene, Scored
from benchmarks.measure import Result
from benchmarks.oneshot_bars import bars
from benchmarks.oneshot_runs import Considered, Outcome
from benchmarks.oneshot_suites import Merging
from benchmarks.page_block import replace_blocks, table
from benchmarks.paper_runs import Outcome as PaperOutcome
from benchmarks.paper_runs import Point
from benchmarks.paper_suites import Experiment, experiments
from benchmarks.report import Report

DOCS = Path(__file__).parents[3] / "docs"
REPORT = Report(
    {"cores": "2", "torch": "2.13.0"},
    ("2030-01-02",),
    {
        "startup": [Result("quick", 0.25, "s", bar=0.3), Result("slow", 2.0, "×", bar=1.5)],
        "loops": [Result("faster", 60.0, "×", bar=50, at_least=True, note="3 s against 0.05 s")],
    },
)


def test_a_block_is_renewed_and_the_words_around_it_stay(tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text("before\n\n<!-- a -->\nold\n<!-- /a -->\n\nafter\n", encoding="utf-8")
    replace_blocks(written, {"a": table(("x", "y"), [("1", r"\2")])})
    wanted = "<!-- a -->\n\n| x | y |\n| --- | --- |\n| 1 | \\2 |\n\n<!-- /a -->"
    assert written.read_text(encoding="utf-8") == f"before\n\n{wanted}\n\nafter\n"
    with pytest.raises(ValueError, match="has no block 'b'"):
        replace_blocks(written, {"b": ""})


def oneshot_results() -> dict[Merging, Outcome]:
    """Return a case of two clients, and two merges without data."""
    names = ("cifar_net-1", "cifar_net-2", "mean client", "best client", "label-free pick")
    scores = (50.0, 53.0, 51.5, 53.0, 53.0, 10.0, 58.0)
    alone = dict(zip((*names, "element-wise average", "ensemble"), scores, strict=True))
    merges = {
        Merging("cifar_net", "ours", "default", seed, 2.0): Outcome(
            {"merge": score},
            1.9,
            10.0,
            "equal clients, fit",
            pull=0.4,
            gain=0.2,
            predicted=0.5,
            considered=_considered(score),
        )
        for seed, score in enumerate((51.5, 53.5))
    }
    return {Merging("cifar_net", "alone", "none", 0): Outcome(alone), **merges}


def _considered(score: float) -> tuple[Considered, ...]:
    return (Considered("a", 0.1, score), Considered("b", 0.3, 40.0))


def test_bars_compare_with_the_best_client_the_ensemble_and_the_rival() -> None:
    case = "cifar_resnet20"
    alone = Outcome({"best client": 92.0, "ensemble": 93.0})
    runs = {
        Merging(case, "alone", "none", 0): alone,
        Merging(case, "plain distillation", "data", 0): Outcome({"merge": 91.0}, pull=-0.5),
        Merging(case, "ours", "data", 0, 2.0): Outcome({"merge": 92.25}, pull=0.5),
        Merging(case, "ours", "default", 0, 2.0): Outcome({"merge": 91.25}, pull=0.125),
    }
    found = {result.what: (result.value, result.is_met) for result in bars(runs)}
    assert found == {
        f"{case}, with 1,000 unlabelled inputs, over the best client": (0.25, False),
        f"{case}, with 1,000 unlabelled inputs, pull": (0.5, True),
        f"{case}, without data, over the best client": (-0.75, True),
        f"{case}, without data, pull": (0.12, False),
    }
    assert [result.note.split(";")[0] for result in bars(runs)][:2] == [
        "plain distillation: -1.00",
        "plain distillation: -0.50",
    ]


def paper_results() -> dict[Experiment, PaperOutcome]:
    """Return FedMA and FedAvg on MNIST, two seeds."""
    found = {}
    for experiment in experiments(
        "mnist", "file", [0, 1], parts=["main"], methods=["fedma", "fedavg"]
    ):
        if experiment.init == "independent":
            accuracy, moved = (90.0, 8.0) if experiment.method == "fedma" else (86.0, 32.0)
            shift = 1 if experiment.seed else -1
            points = (Point(4, moved / 2, accuracy + shift), Point(8, moved, accuracy + 4 + shift))
            found[experiment] = PaperOutcome(points, 1.2, 30.0)
    return found


def many_clients_results() -> many_clients_page.Results:
    """Return commands with ten and a hundred clients, and one scene of two levels."""
    runs = [
        Measured(command, n, n / 10, n / 20, n * 10**6, 0, n * 1000, n, 48, n, n, n, n / 5)
        for command in (MATCH, RETRAIN, OVER_RAY)
        for n in (10, 100)
    ]
    sites = [
        Scored(Scene(32, 4, "homogeneous", init, 0), method, 1.5, accuracy, 1.0, 0.5, 10**6)
        for init in many_clients_page.STARTS
        for method, accuracy in (("one level, 1.5×", 87.0), ("two levels, 1.5×", 86.0))
    ]
    return many_clients_page.Results({"cores": "2"}, runs, sites)


BLOCKS: Mapping[str, Mapping[str, str]] = {
    "benchmarks.md": page.tables(REPORT),
    "oneshot.md": oneshot_page.tables(oneshot_results()),
    "paper.md": paper_page.tables(paper_results()),
    "many-clients.md": many_clients_page.tables(many_clients_results()),
    "reliability.md": {"fuzz": "", "kills": ""},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_page_has_a_place_for_each_of_its_tables(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert sorted(re.findall("<!-- ([a-z0-9-]+) -->", text)) == sorted(BLOCKS[name])
    assert all(f"<!-- /{block} -->" in text for block in BLOCKS[name])


@pytest.mark.parametrize(
    ("name", "block", "says"),
    [
        ("benchmarks.md", "machine", "Measured on 2030-01-02: cores 2, torch 2.13.0.\n"),
        ("benchmarks.md", "results", "2 of 3 bars are met.\nMissed:"),
        ("benchmarks.md", "results", "| slow | 2 × | ≤ 1.5: MISSED |  |"),
        ("benchmarks.md", "results", "| faster | 60 × | ≥ 50: met | 3 s against 0.05 s |"),
        ("oneshot.md", "bars", "0 are met, 1 missed.\n"),
        ("oneshot.md", "bars", "| cifar_net, without data | 52.5 % | ≥ 55: MISSED |"),
        (
            "oneshot.md",
            "families",
            "| cifar_net | 50.0, 53.0 | 51.5 | 53.0 | 53.0 | 10.0 | 58.0 | 52.5",
        ),
        ("oneshot.md", "families", "| 2 | 0.40 | 0.20 | 0.50 | equal clients, fit | 1.90× | 10 |"),
        ("oneshot.md", "lstm", "Not run here: character LSTM, 4 roles.\n"),
        ("oneshot.md", "foresight", "| without data | 2 of 2 | 0.00 (at most 0.00) | 2 of 2 |"),
        ("oneshot.md", "forewarned", "| without data | 0 | 0 | 1 | 1 |"),
        (
            "paper.md",
            "mnist-main",
            "| FedMA, independent | 0, 1 | 90.0 (89.0 to 91.0) | 94.0 (93.0 to 95.0) | 8.0 | 1.20×",
        ),
        ("paper.md", "mnist-main", "at round 4 | 4 points | ≥ 3: met |"),
        ("paper.md", "mnist-main", "Not run here: FedAvg, shared; FedProx, shared; ensemble.\n"),
        ("paper.md", "cifar10-main", "Not run here.\n"),
        ("many-clients.md", "match", "| 100 | 10.00 | 100.00 | 0.10 | 0.00 | 0 | 48 |"),
        ("many-clients.md", "retrain", "| 10 | 0.50 | 0.50 | 10.00 | 0.01 |"),
        ("many-clients.md", "carried", "| `match`, CPU | 100 ms | 16.7 min | 2.78 h |"),
        ("many-clients.md", "lost", "| 1.5×, shared starts | 1.0 | 1.0 to 1.0 | 1 |"),
        ("many-clients.md", "servers", "| 32, 4 | 1.00 | 1.00 | 0.50 | 1.00 | 1.00 |"),
    ],
)
def test_tables_say_what_their_results_say(name: str, block: str, says: str) -> None:
    assert says in BLOCKS[name][block]


def test_a_line_goes_through_the_last_two_runs() -> None:
    first = Measured("match", 10, 9.0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0)
    runs = [first, replace(first, clients=100, cpu=3.0), replace(first, clients=300, cpu=7.0)]
    assert line(runs, lambda run: run.cpu) == Line(0.02, 300, 7.0)


def test_plots_are_of_every_method_by_rounds_and_by_bytes() -> None:
    pictures = paper_page.plots(paper_results())
    assert list(pictures) == ["mnist-rounds", "mnist-bytes"]
    assert all("FedAvg, independent" in picture for picture in pictures.values())
    assert b"pass, server" in many_clients_page.plot(many_clients_results())
