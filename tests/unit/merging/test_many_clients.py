"""Many clients: few open files, time that is not the square of them, tries that are given up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge import MatchOptions, Merge, match
from fedmerge.matching import (
    SearchOptions,
    Shortcuts,
    SolverName,
    StepProblem,
    TooWide,
    best_step,
    match_units,
    prior_at_threshold,
    sweeps,
)
from fedmerge.merging import by_weights
from fedmerge.values import IntArray
from tests.unit.matching.cases import random_clients

CLIENTS, FILES = 200, 64  # of which so many may be open at once
OPTIONS = MatchOptions(sweeps=1)  # so that the number of steps is known
GROWTH = 1.25  # of the columns per client, at most, from 20 to 80 of them
PATIENT = 10**9  # times as wide as fits: never given up

MERGE = """
import resource, sys, fedmerge
resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))
options = fedmerge.MatchOptions(sweeps=1, refine=0)
print(len(fedmerge.match([sys.argv[1]], options, output=sys.argv[2]).clients))
"""


def net(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).state_dict()


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit on open files to set")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.slow
def test_hundreds_of_clients_merge_with_few_open_files(tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "clients"
    folder.mkdir()
    write = torch.save if suffix == ".pt" else save_file
    for number in range(CLIENTS):
        write(net(number), folder / f"c{number}{suffix}")
    done = subprocess.run(
        [sys.executable, "-c", MERGE.format(files=FILES), str(folder), str(tmp_path / "global.pt")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{CLIENTS}\n"


def merged(clients: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Merge, int]:
    """Return a merge within the usual budget, and how many columns its steps looked at."""
    seen: list[int] = []

    def watched(problem: StepProblem, solver: SolverName, shortcuts: Shortcuts) -> IntArray:
        seen.append(problem.existing.shape[1])
        return best_step(problem, solver, shortcuts)

    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "best_step", watched)
        merge = match([net(seed) for seed in range(clients)], OPTIONS)
    return merge, sum(seen)


def test_a_hopeless_try_is_given_up_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, columns = merged(40, monkeypatch)
    monkeypatch.setattr(by_weights, "HOPELESS", PATIENT)
    patient, more = merged(40, monkeypatch)
    assert columns < more / 2
    assert merge.widths == patient.widths
    for name, tensor in patient.state_dict().items():
        assert torch.equal(merge.state_dict()[name], tensor)


def test_the_columns_of_a_merge_grow_with_the_clients_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = (merged(clients, monkeypatch)[1] / clients for clients in (20, 80))
    assert many < GROWTH * few
    monkeypatch.setattr(by_weights, "HOPELESS", PATIENT)
    few, many = (merged(clients, monkeypatch)[1] / clients for clients in (20, 80))
    assert many > GROWTH * few


def test_a_search_ends_where_its_width_is_hopeless() -> None:
    rng = np.random.default_rng(0)
    clients = random_clients([4] * 5, 6, rng=rng)
    prior = prior_at_threshold(0.99, 1.0, gamma=1.0)
    heard = mock.Mock(side_effect=lambda width: width > 10)
    with pytest.raises(TooWide):
        match_units(clients, prior, SearchOptions(), max_width=None, rng=rng, is_hopeless=heard)
    widths = [call.args[0] for call in heard.call_args_list]
    assert widths == sorted(widths)
    assert widths[-1] > 10 >= widths[-2]
    found = match_units(clients, prior, SearchOptions(), max_width=None, rng=rng)
    assert found.width > 10
