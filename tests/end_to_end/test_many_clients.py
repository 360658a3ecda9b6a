"""What a terminal shows of many clients: some of them, and how many there are."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge.values import MOST_LISTED, MOST_ROWS
from tests.end_to_end.helpers import Cli

CLIENTS = 50
LONGEST = 160  # characters of a line

CODE = """
from torch import nn


def build(hidden=4):
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of clients in `models`, with their shards and the model's code."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("models", "shards"):
        (tmp_path / name).mkdir()
    (tmp_path / "net.py").write_text(CODE)
    for number in range(CLIENTS):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
        torch.save(model.state_dict(), tmp_path / "models" / f"c{number}.pt")
        x = rng.standard_normal((8, 6)).astype(np.float32)
        np.savez(tmp_path / "shards" / f"s{number}.npz", x=x, y=np.arange(8) % 2)
    return tmp_path


def test_a_merge_names_few_clients_and_its_command_to_check_it_works(
    folder: Path, cli: Cli
) -> None:
    outcome = cli.done("match", "models", "-o", "global.pt", "--set", "sweeps=1")
    assert f"{CLIENTS} clients (" in outcome.out
    assert f"and {CLIENTS - MOST_LISTED} more)" in outcome.out
    assert max(map(len, outcome.out.splitlines())) < LONGEST
    assert outcome.last_line == "fedmerge verify global.pt models"
    checked = cli.done(*shlex.split(outcome.last_line)[1:])
    assert f"recomputed from its {CLIENTS} clients: equal" in checked.out


def test_a_merge_beside_its_clients_is_no_client_of_the_command_to_check_it(
    folder: Path, cli: Cli
) -> None:
    outcome = cli.done("match", "models", "-o", "models/global.pt", "--set", "sweeps=1")
    checked = cli.done(*shlex.split(outcome.last_line)[1:])
    assert f"recomputed from its {CLIENTS} clients: equal" in checked.out


def test_rounds_name_few_clients(folder: Path, cli: Cli) -> None:
    outcome = cli.done(
        *("retrain", "models", "--shards", "shards", "--model", "net.py:build"),
        *("--epochs", "1", "--set", "sweeps=1", "-o", "global.pt"),
    )
    assert f"fedma with {CLIENTS} clients (" in outcome.out
    assert "paired in order (c0 ← s0.npz" in outcome.err
    assert f"and {CLIENTS - MOST_LISTED} more" in outcome.err
    lines = [*outcome.out.splitlines(), *outcome.err.splitlines()]
    assert max(map(len, lines)) < 2 * LONGEST


def test_a_table_with_a_row_per_client_is_shortened_in_its_middle(folder: Path, cli: Cli) -> None:
    np.savez("data.npz", x=np.zeros((200, 6), np.float32), y=np.arange(200) % 2)
    given = ("partition", "data.npz", "--clients", CLIENTS, "--homogeneous", "-o")
    lines = cli.done(*given, "split").out.splitlines()
    assert len(lines) == 2 + MOST_ROWS
    assert lines[2].split()[0] == "client-1"
    assert lines[-1].split()[0] == f"client-{CLIENTS}"
    assert sum(f"… {CLIENTS - MOST_ROWS + 1} more" in line for line in lines) == 1
    assert len(cli.done(*given, "again", "--json").json["shards"]) == CLIENTS


def test_a_hint_names_few_clients(folder: Path, cli: Cli) -> None:
    given = ("match", "models", "-o", "global.pt", "--set", "client_weight=nobody=2")
    refused = cli.refused(*given, code=2, says=["'nobody', which is no client"])
    assert f"and {CLIENTS - MOST_LISTED} more" in refused.err
