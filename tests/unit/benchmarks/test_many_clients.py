"""Many clients: the page says what its results say, and two levels carry weights through."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import many_clients
from benchmarks.many_clients_page import (
    MATCH,
    OVER_RAY,
    RETRAIN,
    Line,
    exponent,
    line,
    losses,
    page,
)
from benchmarks.many_clients_runs import COUNTS, PARAMETERS, Measured, matched, write_clients
from benchmarks.many_clients_sites import SCENES, Clients, build, in_two_levels, merge
from fedmerge import MatchOptions

ROOT = Path(__file__).parents[3]
RESULTS = many_clients.read_results(ROOT / "benchmarks" / "many-clients-results.json")
LINEAR = 1.15  # the highest exponent that the page calls linear
EQUAL = 1e-5  # float32 means of means

AVERAGE = partial(merge, options=MatchOptions(method="average"))


def test_the_page_is_that_of_its_results() -> None:
    assert (ROOT / "docs" / "many-clients.md").read_text(encoding="utf-8") == page(RESULTS)
    assert (ROOT / "docs" / "many-clients.svg").exists()


@pytest.mark.parametrize("command", [MATCH, RETRAIN])
def test_every_number_of_clients_is_measured(command: str) -> None:
    runs = RESULTS.runs(command)
    assert [run.clients for run in runs] == list(COUNTS)
    for run in runs:
        assert run.up >= 4 * PARAMETERS * run.clients
        assert run.width == runs[0].width


def test_ray_exchanges_what_the_local_engine_does() -> None:
    local = {run.clients: run for run in RESULTS.runs(RETRAIN)}
    runs = RESULTS.runs(OVER_RAY)
    assert [run.clients for run in runs] == [100, 1000]
    for run in runs:
        here = local[run.clients]
        assert (run.up, run.down, run.width) == (here.up, here.down, here.width)
        assert run.seconds > here.training / 2  # two slots


def test_every_scene_is_merged_in_every_way() -> None:
    methods = {run.method for run in RESULTS.sites}
    found = {(run.scene, run.method) for run in RESULTS.sites}
    assert found == {(scene, method) for scene in SCENES for method in methods}
    assert len(RESULTS.sites) == len(found)
    assert all(len(lost) == len(SCENES) / 2 for lost in losses(RESULTS).values())


def test_what_the_page_calls_linear_is() -> None:
    assert exponent(RESULTS.runs(MATCH), lambda run: run.cpu) < LINEAR
    assert exponent(RESULTS.runs(RETRAIN), lambda run: run.cpu - run.training) < LINEAR


def test_a_line_goes_through_the_last_two_runs() -> None:
    first = Measured("match", 10, 9.0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0)
    runs = [first, replace(first, clients=100, cpu=3.0), replace(first, clients=300, cpu=7.0)]
    found = line(runs, lambda run: run.cpu)
    assert found == Line(0.02, 300, 7.0)
    assert found(1000) == pytest.approx(21.0)
    assert found.reaches(201.0) == 10_000
    assert exponent(runs, lambda run: run.clients**2) == pytest.approx(2.0)


def test_clients_are_written_and_merged(tmp_path: Path) -> None:
    write_clients(str(tmp_path), clients=3)
    found = matched(str(tmp_path))
    assert found["up"] == 3 * 4 * PARAMETERS
    assert found["record"] == (tmp_path / "matched.pt.json").stat().st_size


def clients(count: int) -> Clients:
    """Return clients that count differently, in all and by class; the last class is one's alone."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 20, (count, 10)).astype(np.float64)
    counts[1:, -1] = 0
    states = []
    for seed in range(count):
        torch.manual_seed(seed)
        states.append(build(6).state_dict())
    return Clients(states, counts)


def test_an_average_in_two_levels_is_that_in_one() -> None:
    own = clients(7)
    flat, two = AVERAGE(own).state, in_two_levels(own, 3, AVERAGE, AVERAGE).state
    for name, tensor in flat.items():
        assert torch.allclose(two[name], tensor, atol=EQUAL)
    unweighted = replace(own, counts=np.ones_like(own.counts))
    other = in_two_levels(unweighted, 3, AVERAGE, AVERAGE).state
    assert not any(torch.allclose(other[name], flat[name], atol=100 * EQUAL) for name in flat)


def test_copies_merge_in_two_levels_to_the_function_that_they_have() -> None:
    torch.manual_seed(0)
    model = build(16)
    state, rng = model.state_dict(), np.random.default_rng(0)
    orders = [torch.from_numpy(rng.permutation(16)) for _ in range(6)]
    copies = [
        {
            "0.weight": state["0.weight"][order],
            "0.bias": state["0.bias"][order],
            "2.weight": state["2.weight"][:, order],
            "2.bias": state["2.bias"],
        }
        for order in orders
    ]
    matching = partial(merge, options=MatchOptions(max_growth=1.0))
    found = in_two_levels(Clients(copies, np.ones((6, 10))), 3, matching, matching)
    x = torch.from_numpy(rng.standard_normal((5, 196)).astype(np.float32))
    wanted = model(x)
    model.load_state_dict(dict(found.state))
    assert torch.allclose(model(x), wanted, atol=EQUAL)
    averaged = in_two_levels(Clients(copies, np.ones((6, 10))), 3, AVERAGE, AVERAGE)
    model.load_state_dict(dict(averaged.state))
    assert not torch.allclose(model(x), wanted, atol=100 * EQUAL)
