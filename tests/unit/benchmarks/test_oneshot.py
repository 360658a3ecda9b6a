"""One-shot merges against others: their clients, runs, bars and page, on data of a few seconds."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import oneshot, oneshot_clients
from benchmarks.oneshot_bars import bars, foresight, forewarned, not_run
from benchmarks.oneshot_clients import Folders, setting
from benchmarks.oneshot_models import Perceptron
from benchmarks.oneshot_page import page
from benchmarks.oneshot_runs import Considered, Outcome, carry_out, score
from benchmarks.oneshot_suites import (
    CASES,
    CHOICES,
    DEVELOPMENT,
    FAMILIES,
    LENET_BAR,
    UNLABELLED,
    Merging,
    measure_of,
    mergings,
)

FAMILY = "mlp_784_50_10"
TEST = 60
CLASSES = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Write grey images whose class is a bright column, and two untrained strangers."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, UNLABELLED + TEST).astype(np.uint8)
    x = rng.integers(0, 60, (len(y), 28, 28)).astype(np.uint8)
    x[np.arange(len(y)), :, 3 + 6 * y.astype(int)] = 255
    folder = tmp_path_factory.mktemp("oneshot")
    np.savez(
        folder / "mnist.npz", x_train=x[TEST:], y_train=y[TEST:], x_test=x[:TEST], y_test=y[:TEST]
    )
    for number in (1, 2):
        torch.manual_seed(number)
        torch.save(Perceptron().state_dict(), folder / f"{FAMILY}-{number}.pt")
    return Folders(folder, folder, folder / "work")


def run(folders: Folders, results: Path, *more: str) -> list[tuple[str, str, int]]:
    """Merge the two strangers; return what the results file then has."""
    words = ["--data", str(folders.data), "--checkpoints", str(folders.checkpoints)]
    kept = ["--work", str(folders.work), "--results", str(results)]
    oneshot.main([*words, *kept, "--cases", FAMILY, *more])
    found = (value["merging"] for value in json.loads(results.read_text(encoding="utf-8")))
    return [(merging["method"], merging["probes"], merging["seed"]) for merging in found]


def test_a_results_file_is_added_to_and_nothing_is_run_twice(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "r.json"
    alone, matched = ("alone", "none", 0), ("activations", "data", 0)
    assert run(folders, results, "--seeds", "0", "--methods", "alone") == [alone]
    both = ("--seeds", "0", "--methods", "alone", "activations")
    assert run(folders, results, *both) == [alone, matched]
    before = results.read_bytes()
    monkeypatch.setattr(oneshot, "carry_out", lambda *_: pytest.fail("run again"))
    run(folders, results, *both)
    assert results.read_bytes() == before
    with pytest.raises(pytest.fail.Exception, match="run again"):
        run(folders, results, "--seeds", "0", "--methods", "paper")
    clients, _ = oneshot.read_results(results).values()
    each = [clients.scores[f"{FAMILY}-{number}"] for number in (1, 2)]
    assert clients.scores["mean client"] == pytest.approx(sum(each) / 2)
    assert clients.scores["best client"] == max(each)


def test_every_candidate_is_tested_and_the_chosen_one_is_the_merge(folders: Folders) -> None:
    merge = carry_out(Merging(FAMILY, "ours", "data", 0, 2.0), folders)
    chosen = {c.name: c for c in merge.considered}[merge.chosen]
    assert (chosen.score, chosen.agreement) == (merge.scores["merge"], merge.predicted)
    assert chosen.agreement == max(c.agreement for c in merge.considered)
    assert len(merge.considered) == 5
    assert 1 <= merge.growth <= 2


def test_other_files_are_other_merges(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes((folders.data / "mnist.npz").read_bytes())
    for number in (1, 2):
        (tmp_path / f"{FAMILY}-{number}.pt").write_bytes(bytes([number]))
    other = Folders(tmp_path, tmp_path, tmp_path)
    assert other.digest(FAMILY) != folders.digest(FAMILY)
    assert other.digest(LENET_BAR) == folders.digest(LENET_BAR)  # nothing but the data


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    empty = Folders(tmp_path, tmp_path, tmp_path)
    with pytest.raises(SystemExit, match=r"there is no mnist\*\.npz"):
        empty.source("mnist")
    with pytest.raises(SystemExit, match="no two checkpoints cifar_net-"):
        empty.strangers("cifar_net")


def test_clients_are_trained_once_and_none_has_the_unlabelled_images(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(CASES[LENET_BAR], clients=2, samples=300, epochs=1)
    monkeypatch.setattr(oneshot_clients, "RECIPES", {LENET_BAR: small})
    found = setting(LENET_BAR, 0, folders)
    assert [file.name for file in found.files] == ["client-1.pt", "client-2.pt"]
    assert (len(found.x), found.code.input_shapes) == (TEST, ((2, 1, 28, 28),))
    shards = found.files[0].parent / "shards"
    own = {row.tobytes() for path in shards.iterdir() for row in np.load(path)["x"]}
    assert found.unlabelled is not None
    others = {row.tobytes() for row in np.load(found.unlabelled)["x"]}
    assert (len(own), len(others), len(own & others)) == (300, 300, 0)
    monkeypatch.setattr(oneshot_clients, "train_model", lambda *_: pytest.fail("trained again"))
    assert setting(LENET_BAR, 0, folders).files == found.files
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        setting(LENET_BAR, 1, folders)


def test_development_clients_are_judged_on_training_images_that_are_no_probes(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = "CNN with batch norm"
    small = replace(DEVELOPMENT[case], clients=2, samples=400, epochs=1)
    monkeypatch.setattr(oneshot_clients, "RECIPES", {case: small})
    monkeypatch.setattr(oneshot_clients, "UNLABELLED", 100)
    found = setting(case, 10, folders)
    shards = found.files[0].parent / "shards"
    own = {row.tobytes() for path in shards.iterdir() for row in np.load(path)["x"]}
    assert found.unlabelled is not None
    probes = {row.tobytes() for row in np.load(found.unlabelled)["x"]}
    judged = {row.tobytes() for row in found.x.numpy()}
    assert (len(probes), len(judged), len(found.y)) == (100, 300, 300)
    assert not judged & (own | probes)
    with np.load(folders.source("mnist")) as data:
        assert len(data["x_train"]) == UNLABELLED  # 400 for clients, 400 others: none of the test's


def test_choices_are_made_on_other_seeds_and_without_strangers() -> None:
    chosen = list(mergings(["choices"]))
    assert {merging.case for merging in chosen} == set(DEVELOPMENT)
    assert {merging.seed for merging in chosen} == {10, 11, 12}
    assert not {merging.seed for merging in mergings() if merging.case in CASES} & {10, 11, 12}
    assert {merging.method for merging in chosen} >= {*CHOICES, "ours", "files"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_code_runs_on_its_inputs(family: str) -> None:
    code = oneshot_clients._code(FAMILIES[family])
    model = code.build()
    logits = model(*code.inputs(model))
    rows = (2, 100, 100) if measure_of(family) == "bits" else (2, 10)
    assert tuple(logits.shape) == rows


def test_texts_are_scored_by_bits_and_others_by_right_decisions() -> None:
    y = torch.tensor([[0, 1], [2, 3]])
    even = torch.zeros(2, 2, 8)
    assert score(even, y, "bits") == pytest.approx(math.log2(8))
    sure = torch.nn.functional.one_hot(y, 8).float()
    assert score(sure, y, "accuracy") == 100
    assert score(sure.roll(1, 0), y, "accuracy") == 0


def test_what_takes_no_probes_is_run_once_for_strangers_and_for_every_seed_else() -> None:
    def seeds(case: str, method: str) -> list[int]:
        return [m.seed for m in mergings(cases=[case], methods=[method])]

    assert seeds("cifar_net", "paper") == [0]
    assert seeds("cifar_net", "ours") == [0, 0, 1, 1, 2, 2]
    assert seeds(LENET_BAR, "paper") == [0, 1, 2]
    assert {m.growth for m in mergings(methods=["ours"]) if m.case in FAMILIES} == {2.0}
    assert {m.growth for m in mergings(methods=["ours"]) if m.case in CASES} == {1.5}
    assert [(m.method, m.growth) for m in mergings(cases=[LENET_BAR], seeds=[0])][:2] == [
        ("alone", None), ("paper", None)
    ]  # fmt: skip


def considered(**rows: tuple[float, float]) -> tuple[Considered, ...]:
    return tuple(Considered(name, own, 0.5, score) for name, (own, score) in rows.items())


def test_foresight_counts_what_was_lost_and_pairs_that_are_not_near() -> None:
    good = Outcome({"merge": 90.0}, considered=considered(a=(95, 90), b=(80, 70), c=(79, 69.5)))
    bad = Outcome({"merge": 60.0}, considered=considered(a=(95, 60), b=(80, 64)))
    lonely = Outcome({"merge": 10.0}, considered=considered(a=(95, 10)))
    found = foresight([good, bad, lonely])
    assert (found.merges, found.right, found.lost) == (2, 1, (0.0, 4.0))
    assert (found.pairs, found.ordered) == (3, 2)


def results_with(scores: Mapping[str, float]) -> dict[Merging, Outcome]:
    """Return runs without data of two seeds, one above and one below these scores."""
    return {
        Merging(case, "ours", "default", seed, 2.0): Outcome(
            {"merge": mean + (1 if seed else -1)}, 1.9, 10.0, "equal clients, fit", 95.0, 90.0
        )
        for case, mean in scores.items()
        for seed in (0, 1)
    }


def test_bars_are_on_means_over_seeds_and_bits_have_to_be_few() -> None:
    found = list(bars(results_with({"cifar_net": 53.5, "charrnn_gru_2x100": 2.3})))
    assert [(r.value, r.is_met) for r in found] == [(53.5, True), (2.3, True)]
    assert found[0].note == "by seed: 52.50, 54.50"
    missed = bars(results_with({"cifar_net": 52.9, "charrnn_gru_2x100": 2.5}))
    assert [r.is_met for r in missed] == [False, False]
    assert "cifar_net, without data" not in not_run(results_with({"cifar_net": 50}))
    assert "cifar_net, with 1,000 unlabelled inputs" in not_run(results_with({"cifar_net": 50}))


def with_clients(results: dict[Merging, Outcome]) -> dict[Merging, Outcome]:
    """Return results with two clients of cifar_net, of 50 and 53 %."""
    names = ("cifar_net-1", "cifar_net-2", "mean client", "best client", "element-wise average")
    alone = dict(zip((*names, "ensemble"), (50.0, 53.0, 51.5, 53.0, 10.0, 58.0), strict=True))
    return {Merging("cifar_net", "alone", "none", 0): Outcome(alone), **results}


def test_a_warning_is_right_where_the_merge_is_worse_than_the_best_client() -> None:
    worse, better = results_with({"cifar_net": 52.5}).items()  # 51.5 and 53.5, no warnings
    assert forewarned(with_clients(dict([worse, better])), "default") == {
        (False, True): 1,
        (False, False): 1,
    }
    warning = "the merge may be worse than client a (made-up probes flatter a merge): …"
    warned = {m: replace(o, warnings=(warning,)) for m, o in (worse, better)}
    assert forewarned(with_clients(warned), "default") == {(True, True): 1, (True, False): 1}
    assert not forewarned(with_clients(warned), "data")
    other = {m: replace(o, warnings=("a is the same file as b",)) for m, o in (worse, better)}
    assert (True, True) not in forewarned(with_clients(other), "default")


def test_the_page_has_means_with_their_spread_and_says_what_was_not_run() -> None:
    results = with_clients(results_with({"cifar_net": 52.5}))
    text = page(results)
    assert "## Bars: 0 met, 1 missed\n" in text
    assert "| cifar_net, without data | 52.5 % | ≥ 53: MISSED | by seed: 51.50, 53.50 |" in text
    assert "| cifar_net | 50.0, 53.0 | 51.5 | 53.0 | 10.0 | 58.0 | 52.5 (51.5 to 53.5) |" in text
    assert "| 2 | 95.0 % | 90.0 % | equal clients, fit | 1.90× | 10 |" in text
    assert "Not run here: character LSTM, 4 roles.\n" in text


def test_the_script_runs_as_a_file_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(oneshot.__file__))]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "default: oneshot-results.json" in done.stdout


def test_the_script_says_which_folders_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        oneshot.main(["--data", "somewhere"])
    assert "run needs --checkpoints" in capsys.readouterr().err


def test_the_page_is_that_of_the_results() -> None:
    """All but the machine, which is that of whoever writes the page."""

    def told(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("Run on: ")]

    root = Path(__file__).parents[3]
    results = oneshot.read_results(root / "benchmarks" / "oneshot-results.json")
    assert told((root / "docs" / "oneshot.md").read_text(encoding="utf-8")) == told(page(results))
