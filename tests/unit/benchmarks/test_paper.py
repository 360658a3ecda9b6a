"""The paper's comparison: its data, nets, runs, page and plots, on data of a few seconds."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import paper
from benchmarks.paper_data import STEPS, Split, write_scene
from benchmarks.paper_leads import leads
from benchmarks.paper_models import Start, lenet, vgg9_half
from benchmarks.paper_page import by_method, page, plots, shown
from benchmarks.paper_plot import Mark, Series, plot, round_numbers
from benchmarks.paper_runs import Outcome, Point
from benchmarks.paper_suites import Experiment, experiments

STARTS: tuple[Start, Start] = ("he", "torch")
CLASSES, TRAIN, TEST = 4, 900, 60
ALPHABET = "abcdefgh "


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write grey images whose class is a bright column."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, TRAIN + TEST).astype(np.uint8)
    x = rng.integers(0, 60, (TRAIN + TEST, 28, 28)).astype(np.uint8)
    x[np.arange(len(y)), :, 3 + 6 * y.astype(int)] = 255
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, x_train=x[TEST:], y_train=y[TEST:], x_test=x[:TEST], y_test=y[:TEST])
    return path


@pytest.fixture
def play(tmp_path: Path) -> Path:
    """Write speeches of three roles; each later one says less."""
    rng = np.random.default_rng(0)
    blocks = []
    for number in range(30):
        for role, length in (("FIRST LORD", 200), ("SECOND", 150), ("THIRD", 20)):
            speech = "".join(rng.choice(list(ALPHABET), length))
            blocks.append(f"{role}:\n{speech}{number % 10}")
    path = tmp_path / "play.txt"
    path.write_text("\n\n".join(blocks), encoding="utf-8")
    return path


def split(dataset: str, on: str = "test", samples: int = 600) -> Split:
    return Split(dataset, clients=2, samples=samples, seed=0, on=on)


def rows_of(path: Path) -> set[bytes]:
    with np.load(path) as data:
        return {row.tobytes() for row in data["x"]}


def test_clients_share_all_drawn_images_and_none_is_evaluated(images: Path, tmp_path: Path) -> None:
    for on, evaluated in (("test", TEST), ("validation", TRAIN - 600)):
        scene = write_scene(images, tmp_path / on, split("mnist", on))
        clients = [rows_of(path) for path in scene.clients.values()]
        assert list(scene.clients) == ["client-1", "client-2"]
        assert sum(map(len, clients)) == len(set().union(*clients)) == 600
        held = rows_of(scene.evaluation)
        assert len(held) == evaluated
        assert not held & set().union(*clients)


def test_another_seed_draws_other_images(images: Path, tmp_path: Path) -> None:
    scenes = [
        write_scene(images, tmp_path / str(seed), replace(split("mnist"), seed=seed))
        for seed in (0, 1)
    ]
    first, second = (set().union(*map(rows_of, s.clients.values())) for s in scenes)
    assert first != second


def test_roles_that_say_most_are_clients_and_their_ends_are_held_out(
    play: Path, tmp_path: Path
) -> None:
    scene = write_scene(play, tmp_path / "test", split("shakespeare", samples=5000))
    assert list(scene.clients) == ["First-Lord", "Second"]
    assert scene.tokens == len(set(play.read_text()))
    with np.load(scene.clients["First-Lord"]) as data:
        x, y = data["x"], data["y"]
    assert x.shape == y.shape == ((4000 - 1) // STEPS, STEPS)
    assert np.array_equal(x.ravel()[1:], y.ravel()[:-1])
    tried = write_scene(play, tmp_path / "try", split("shakespeare", "validation", 5000))
    test, validation = rows_of(scene.evaluation), rows_of(tried.evaluation)
    assert not test & validation
    with np.load(tried.clients["First-Lord"]) as data:
        assert len(data["x"]) == (3200 - 1) // STEPS


def test_the_nets_are_those_of_the_appendix() -> None:
    assert sum(p.numel() for p in lenet("he").parameters()) == 431_080
    torch.manual_seed(0)
    wide, narrow = (lenet(start).get_parameter("fc1.weight").var().item() for start in STARTS)
    assert wide / narrow == pytest.approx(6, rel=0.02)
    assert vgg9_half("torch")(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def run(images: Path, results: Path, *more: str) -> list[str]:
    """Run FedMA and FedAvg at their smallest; return what was told."""
    size = ("samples=240", "rounds=4", "epochs=1", "clients=2", "learning_rate=0.01")
    words = ["mnist", str(images), "--parts", "main", "--seeds", "0", "--results", str(results)]
    paper.main([*words, *more, "--set", *size])
    return [str(value["experiment"]["method"]) for value in json.loads(results.read_text())]


def test_the_script_runs_as_a_file_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(paper.__file__)), "mnist", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "--results RESULTS" in done.stdout
    assert "default: paper-results.json" in done.stdout


def test_a_results_file_is_added_to_and_nothing_is_run_twice(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "r.json"
    assert run(images, results, "--methods", "fedma") == ["fedma"]
    assert run(images, results, "--methods", "fedma", "ensemble") == ["fedma", "ensemble"]
    before = results.read_bytes()
    monkeypatch.setattr(paper, "carry_out", lambda *_: pytest.fail("run again"))
    run(images, results, "--methods", "fedma", "ensemble")
    assert results.read_bytes() == before
    fedma, alone = paper.read_results(results).values()
    assert [point.round for point in fedma.points] == [4]
    assert 1 <= fedma.growth <= 1.25
    assert set(alone.others) == {"mean", "best", "average", "ensemble", "match"}
    assert alone.points[0].accuracy == alone.others["ensemble"]
    with pytest.raises(pytest.fail.Exception, match="run again"):
        run(images, results, "--methods", "fedma", "--on", "validation")


def results_with(fedma: tuple[float, float], fedavg: tuple[float, float]) -> paper.Results:
    """Return main runs of two seeds, one point below and above these accuracies."""
    wanted = {"fedma": (fedma, 8.0), "fedavg": (fedavg, 32.0)}
    found = {}
    for experiment in experiments("mnist", "file", [0, 1], parts=["main"], methods=list(wanted)):
        if experiment.init == "independent":
            (early, late), megabytes = wanted[experiment.method]
            shift = 1 if experiment.seed else -1
            points = (
                Point(4, megabytes / 2, early + shift),
                Point(8, megabytes, late + shift),
            )
            found[experiment] = Outcome(points, 1.2, 30.0)
    return found


def test_bars_compare_the_same_seeds_at_the_same_round() -> None:
    found = leads(by_method(results_with((90, 94), (86, 93))), judged=True)
    assert [round(lead.value, 9) for lead in found] == [4, 4, 1, 1, 0.25]
    assert [lead.is_met for lead in found] == [True, True, False, False, True]
    assert all(
        lead.bar is None
        for lead in leads(by_method(results_with((90, 94), (86, 93))), judged=False)
    )


def test_by_bytes_the_last_round_of_fedavg_is_taken_that_has_no_more_than_fedma() -> None:
    usual = results_with((90, 94), (86, 93))
    early = {
        e: replace(
            o, points=(Point(1, 4.0, 50.0), Point(2, 7.9, 60.0), Point(3, 8.1, 70.0), *o.points)
        )
        for e, o in usual.items()
        if e.method == "fedavg"
    }
    *_, mean, median = leads(by_method({**usual, **early}), judged=True)
    assert mean.what == "FedMA at round 8 ahead of what FedAvg has for its bytes, round 2"
    assert (mean.note, mean.value, median.value) == ("by seed: 33.0, 35.0", 34, 34)
    assert mean.bar is None


def test_a_seed_that_decides_alone_is_seen_in_the_leads_and_the_median() -> None:
    usual = results_with((90, 94), (89, 93))
    [third] = [e for e in usual if e.method == "fedma" and e.seed == 0]
    collapsed = {
        replace(e, seed=2): Outcome((Point(4, 1.0, low), Point(8, 2.0, low)), 1.2, 30.0)
        for e, low in ((third, 90.0), (replace(third, method="fedavg"), 10.0))
    }
    early, median, *_ = leads(by_method({**usual, **collapsed}), judged=True)
    assert (early.value, median.value) == (27.33, 1.0)
    assert early.note == "by seed: 1.0, 1.0, 80.0"
    assert (early.is_met, median.is_met) == (True, False)


def test_the_page_has_means_with_their_spread_and_says_what_was_not_run() -> None:
    text = page(results_with((90, 94), (86, 93)))
    row = "| FedMA, independent | 0, 1 | 90.0 (89.0 to 91.0) | 94.0 (93.0 to 95.0) | 8.0 | 1.20×"
    assert row in text
    assert "at round 8 | 1 points | ≥ 2: MISSED |" in text
    assert "at round 4 | 4 points | ≥ 3: met |" in text
    assert text.count("Not run here.") == 4  # initialisation, epochs, Shakespeare and CIFAR-10
    assert "Not run here: FedAvg, shared; FedProx, shared; ensemble.\n" in text


def test_only_runs_with_the_settings_of_the_page_are_shown() -> None:
    usual = results_with((90, 94), (86, 93))
    other = {replace(e, samples=100): outcome for e, outcome in usual.items()}
    tried = {replace(e, on="validation", max_growth=1.5): o for e, o in usual.items()}
    everything = {**other, **usual, **tried}
    assert shown(everything, "mnist", "main") == usual
    assert shown(other, "mnist", "main") == {}
    text = page(everything)
    assert text.count("| 0, 1 | max_growth 1.5 |") == len(tried) / 2  # two seeds a row
    assert "| 90.0 (89.0 to 91.0) at round 4; 94.0 (93.0 to 95.0) at round 8 | 8.0 |" in text
    assert "samples 100" not in text


def test_local_epochs_are_compared_after_one_pass_of_the_same_seed() -> None:
    [one, *_] = experiments("mnist", "file", [0, 1], parts=["epochs"], methods=["fedma"])
    usual = results_with((90, 94), (86, 93))
    text = page({**usual, one: Outcome((Point(4, 1.0, 70.0),), 1.2, 30.0)})
    assert (
        "| local epochs | FedMA, independent |\n| --- | --- |\n| 1 | 70.0 |\n| 3 | 89.0 |" in text
    )


def test_plots_are_pictures_of_every_method_by_rounds_and_by_bytes() -> None:
    pictures = plots(results_with((90, 94), (86, 93)))
    assert list(pictures) == ["mnist-rounds", "mnist-bytes"]
    for picture in pictures.values():
        root = ET.fromstring(picture)
        lines = [node for node in root if node.tag.endswith("polyline")]
        assert [len(line.attrib["points"].split()) for line in lines] == [2, 2]
        assert "FedAvg, independent" in picture


def test_a_plot_puts_larger_numbers_further_up_and_right() -> None:
    line = Series("a < b", (Mark(1, 10, 9, 12), Mark(2, 20, 20, 20)))
    root = ET.fromstring(plot([line], x_label="x", y_label="y"))
    [points] = [node.attrib["points"] for node in root if node.tag.endswith("polyline")]
    (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in points.split())
    assert x2 > x1
    assert y2 < y1
    assert "a < b" in [node.text for node in root]


def test_heights_are_logarithms_of_the_error() -> None:
    line = Series("a", tuple(Mark(x, 100 - e, 100 - e, 100 - e) for x, e in enumerate((80, 20, 5))))
    root = ET.fromstring(plot([line], x_label="x", y_label="y"))
    [points] = [node.attrib["points"] for node in root if node.tag.endswith("polyline")]
    first, second, third = (float(pair.split(",")[1]) for pair in points.split())
    assert second - first == pytest.approx(third - second, abs=0.2)  # a quarter of the error each


def test_a_level_goes_from_end_to_end_and_a_line_of_one_mark_is_a_point() -> None:
    marks = (Mark(1, 50, 50, 50),)
    for is_level, dashed, circles in ((True, 1, 1), (False, 0, 2)):  # one circle beside the name
        other = Series("b", (Mark(9, 10, 10, 10),), is_level=True)
        picture = plot([other, Series("a", marks, is_level)], x_label="x", y_label="y")
        assert picture.count("stroke-dasharray") == 1 + dashed
        assert picture.count("<circle") == 1 + circles


def test_numbers_on_an_axis_are_round() -> None:
    assert round_numbers(8) == list(range(9))
    assert round_numbers(110.4) == [0, 20, 40, 60, 80, 100]
    assert round_numbers(0.36) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35])


def test_the_experiment_of_the_bars_is_that_of_the_bars() -> None:
    main: list[Experiment] = list(experiments("mnist", "", [0], parts=["main"]))
    assert {(e.clients, e.samples, e.epochs, e.rounds) for e in main} == {(4, 5000, 3, 8)}
    assert [e.init for e in main if e.method in ("fedma", "fedavg")][:2] == ["independent"] * 2
