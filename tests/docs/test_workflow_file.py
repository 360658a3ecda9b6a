"""The workflow for CI that the docs offer: its steps run, and stop where they must."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from tests.end_to_end.malice import Payload, save_raw
from tests.pages import DOCS

FILE = DOCS / "how-to" / "fedmerge-ci.yml"
INSTALL = "Install"  # is done already
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")  # as Actions does
CODE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
"""
WORKFLOW: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
Shares = tuple[float, float, float]  # of the classes
STEPS = [step for step in WORKFLOW["jobs"]["merge"]["steps"] if "run" in step]
CHECK, MERGE, VERIFY, MEASURE, REFUSE, REPORT = (s["name"] for s in STEPS if s["name"] != INSTALL)


def run_steps(folder: Path) -> Mapping[str, int]:
    """Run the steps in order up to the first that fails; return their exit codes."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **WORKFLOW["env"], "PATH": path, "OMP_NUM_THREADS": "1", "CI": "true"}
    codes: dict[str, int] = {}
    for step in STEPS:
        if step["name"] == INSTALL:
            continue
        done = subprocess.run(
            [*SHELL, step["run"]], cwd=folder, env=env, capture_output=True, check=False
        )
        codes[step["name"]] = done.returncode
        if done.returncode:
            break
    return codes


def samples(seed: int, count: int, shares: Shares) -> tuple[Tensor, Tensor]:
    """Return points around one centre per class."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(99))
    labels = torch.multinomial(
        torch.tensor(shares, dtype=torch.float32), count, replacement=True, generator=draw
    )
    return centres[labels] + torch.randn(count, 6, generator=draw), labels


def save_client(folder: Path, seed: int, shares: Shares) -> None:
    """Train a net on classes in these shares, and write it as c1, c2, …"""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    inputs, labels = samples(seed, 300, shares)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.save(model.state_dict(), folder / "clients" / f"c{seed}.pt")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository as the workflow expects it, with clients that know all classes."""
    (tmp_path / "clients").mkdir()
    (tmp_path / "net.py").write_text(CODE)
    save_client(tmp_path, 1, (0.49, 0.49, 0.02))
    save_client(tmp_path, 2, (0.02, 0.49, 0.49))
    inputs, labels = samples(7, 300, (1, 1, 1))
    np.savez(tmp_path / "test.npz", x=inputs.numpy(), y=labels.numpy())
    return tmp_path


@pytest.mark.slow  # six processes
def test_a_good_merge_passes_every_step_and_leaves_what_is_kept(repository: Path) -> None:
    steps = (CHECK, MERGE, VERIFY, MEASURE, REFUSE, REPORT)
    assert run_steps(repository) == dict.fromkeys(steps, 0)
    kept = WORKFLOW["jobs"]["merge"]["steps"][-1]["with"]["path"].split()
    assert kept == ["global.pt", "global.pt.json", "report.html"]
    assert all((repository / name).stat().st_size for name in kept)


@pytest.mark.slow
def test_a_merge_that_is_worse_than_the_best_client_is_refused(repository: Path) -> None:
    save_client(repository, 1, (0.5, 0.5, 0))
    save_client(repository, 2, (0, 0.5, 0.5))
    codes = run_steps(repository)
    assert codes == {CHECK: 0, MERGE: 0, VERIFY: 0, MEASURE: 0, REFUSE: 1}


def test_a_damaged_client_stops_the_job_at_once(repository: Path) -> None:
    file = repository / "clients" / "c2.pt"
    file.write_bytes(file.read_bytes()[:200])
    assert run_steps(repository) == {CHECK: 1}


@pytest.mark.slow
def test_a_client_of_another_architecture_stops_the_job_at_once(repository: Path) -> None:
    torch.save(nn.Linear(6, 3).state_dict(), repository / "clients" / "c2.pt")
    assert run_steps(repository) == {CHECK: 3}


@pytest.mark.slow
def test_a_client_that_asks_for_code_stops_the_job_at_once(repository: Path) -> None:
    save_raw(Payload(repository / "ran"), repository / "clients" / "c2.pt")
    assert run_steps(repository) == {CHECK: 4}
    assert not (repository / "ran").exists()
