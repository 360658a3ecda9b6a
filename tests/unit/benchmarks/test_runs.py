"""One run of every benchmark with a page, at its smallest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import many_clients, oneshot, oneshot_trials, paper
from benchmarks.many_clients_runs import PARAMETERS, matched, write_clients
from benchmarks.many_clients_sites import Clients, build, in_two_levels, merge
from benchmarks.oneshot_models import Perceptron
from benchmarks.oneshot_suites import CASES, CHOICES, DEVELOPMENT, UNLABELLED, mergings
from benchmarks.retraining import measure
from benchmarks.suites import SUITES
from fedmerge import MatchOptions

FAMILY = "mlp_784_50_10"
CLASSES, TEST = 4, 60
EQUAL = 1e-5  # float32 means of means
LAYERS = ["conv1", "conv2", "fc1", "last layer"]

AVERAGE = partial(merge, options=MatchOptions(method="average"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write grey images whose class is a bright column, and two untrained checkpoints."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, UNLABELLED + TEST).astype(np.uint8)
    x = rng.integers(0, 60, (len(y), 28, 28)).astype(np.uint8)
    x[np.arange(len(y)), :, 3 + 6 * y.astype(int)] = 255
    made = tmp_path_factory.mktemp("data")
    np.savez(
        made / "mnist.npz", x_train=x[TEST:], y_train=y[TEST:], x_test=x[:TEST], y_test=y[:TEST]
    )
    for number in (1, 2):
        torch.manual_seed(number)
        torch.save(Perceptron().state_dict(), made / f"{FAMILY}-{number}.pt")
    return made


def test_one_shot_merges_are_added_to_their_results_and_run_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "r.json"
    words = ["--data", str(folder), "--checkpoints", str(folder), "--results", str(results)]
    words += ["--work", str(tmp_path / "work"), "--cases", FAMILY, "--seeds", "0", "--methods"]
    oneshot.main([*words, "alone"])
    oneshot.main([*words, "alone", "files"])
    monkeypatch.setattr(oneshot, "carry_out", lambda *_: pytest.fail("run again"))
    oneshot.main([*words, "alone", "files"])
    alone, files = oneshot.read_results(results).values()
    each = [alone.scores[f"{FAMILY}-{number}"] for number in (1, 2)]
    assert alone.scores["mean client"] == pytest.approx(sum(each) / 2)
    assert 1 <= files.growth <= 2
    with pytest.raises(pytest.fail.Exception, match="run again"):
        oneshot.main([*words, "paper"])


def test_trials_go_from_a_client_to_what_training_makes_of_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(folder), "--checkpoints", str(folder), "--case", FAMILY]
    for steps in ("1", "20"):
        oneshot_trials.main([*words, "--steps", steps, "--ways", "pastes", ""])
    first, then = np.array(capsys.readouterr().out.splitlines()).reshape(2, -1)
    assert [line[:3] for line in first] == ["0.0", "0.2", "0.4", "0.7", "1.0"]
    assert first[0] == then[0]  # the client itself
    assert float(then[-1].split()[-1]) > float(first[-1].split()[-1]) + 0.05


def test_choices_are_made_on_other_seeds_and_other_clients() -> None:
    chosen = list(mergings(["choices"]))
    assert {merging.case for merging in chosen} == set(DEVELOPMENT)
    assert {merging.method for merging in chosen} >= {*CHOICES, "ours", "files"}
    judged = {merging.seed for merging in mergings() if merging.case in CASES}
    assert not {merging.seed for merging in chosen} & judged


def test_rounds_are_added_to_their_results_and_run_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "r.json"
    words = ["mnist", str(folder / "mnist.npz"), "--parts", "main", "--seeds", "0"]
    size = ("samples=240", "rounds=4", "epochs=1", "clients=2", "learning_rate=0.01")
    words += ["--results", str(results), "--set", *size, "--methods"]
    paper.main([*words, "fedma"])
    monkeypatch.setattr(paper, "carry_out", lambda *_: pytest.fail("run again"))
    paper.main([*words, "fedma"])
    [outcome] = paper.read_results(results).values()
    assert [point.round for point in outcome.points] == [4]
    assert 1 <= outcome.growth <= 1.25
    with pytest.raises(pytest.fail.Exception, match="run again"):
        paper.main([*words, "ensemble"])


def test_many_clients_are_written_and_merged(tmp_path: Path) -> None:
    write_clients(str(tmp_path), clients=3)
    found = matched(str(tmp_path))
    assert found["up"] == 3 * 4 * PARAMETERS
    assert found["record"] == (tmp_path / "matched.pt.json").stat().st_size


def test_results_of_many_clients_survive_their_file(tmp_path: Path) -> None:
    from tests.unit.benchmarks.test_tables import many_clients_results

    results, kept = many_clients_results(), many_clients.Kept(tmp_path / "r.json")
    kept.add(scaling=results.scaling, sites=results.sites)
    again = many_clients.read_results(tmp_path / "r.json")
    assert (list(again.scaling), list(again.sites)) == (results.scaling, results.sites)


def test_an_average_in_two_levels_is_that_in_one() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 20, (7, 10)).astype(np.float64)
    states = []
    for seed in range(7):
        torch.manual_seed(seed)
        states.append(build(6).state_dict())
    flat = AVERAGE(Clients(states, counts)).state
    two = in_two_levels(Clients(states, counts), 3, AVERAGE, AVERAGE).state
    other = in_two_levels(Clients(states, np.ones_like(counts)), 3, AVERAGE, AVERAGE).state
    for name, tensor in flat.items():
        assert torch.allclose(two[name], tensor, atol=EQUAL)
        assert not torch.allclose(other[name], tensor, atol=100 * EQUAL)


def test_every_part_of_retraining_is_measured() -> None:
    parts = measure(clients=2, samples=40, epochs=1, repeats=1)["parts"]
    assert [part["name"] for part in parts] == ["preparation", *LAYERS, "the result"]
    assert [part["name"] for part in parts if part["training"]["cpu"] > 0] == LAYERS


def test_what_make_bench_runs_is_not_slow() -> None:
    quick = [name for name, suite in SUITES.items() if not suite.is_slow]
    assert quick == [
        "startup",
        "matching",
        "loops",
        "shortcuts",
        "runs",
        "deep",
        "memory",
        "retraining",
    ]
