"""Merges of recurrent clients with signs and bases made alike, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import Cli, record_of
from tests.model_zoo import ZOO

LANGUAGE = "language model"
MODEL = ("--model", f"{__name__}:build", "--input-shape", "2,5", "--input-dtype", "long")
FEW = ("--probe", "noise", "--probe-count", "60")
ALIKE = {"encoder.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l1", "decoder.weight"}


def build() -> torch.nn.Module:
    return ZOO[LANGUAGE].build()


@pytest.fixture
def clients(tmp_path: Path) -> list[Path]:
    """Two language models as c1.pt and c2.pt."""
    paths = [tmp_path / f"c{seed}.pt" for seed in (1, 2)]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        torch.save(build().state_dict(), path)
    return paths


@pytest.mark.parametrize("units", ["mean", "fit"])
def test_a_merge_of_clients_made_alike_is_verified(
    cli: Cli, clients: list[Path], tmp_path: Path, units: str
) -> None:
    output = tmp_path / "out.safetensors"
    given = (*clients, *MODEL, *FEW, "--merge-units", units, "-o", output)
    told = cli.done("match", *given, "--json").json
    assert told["quality"]["chosen"].endswith(f", {units}")
    record = record_of(output)
    assert set(record["fitted"]) >= ALIKE
    assert ("decoder.bias" in record["fitted"]) == (units == "fit")
    found = cli.done("verify", output, *clients, *MODEL, "--json").json
    assert found["ok"]
    assert found["fitted"] == len(record["fitted"])


def test_a_changed_average_is_noticed_beside_tensors_that_were_made_alike(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.safetensors"
    cli.done("match", *clients, *MODEL, *FEW, "--merge-units", "mean", "-o", output)
    state = torch.load(clients[1])
    state["decoder.bias"] += 1
    torch.save(state, clients[1])
    assert cli("verify", output, *clients).code != 0
