"""Lightning checkpoints in, Lightning checkpoints out."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.helpers import Cli, State, independent, record_of
from tests.zoo import ZOO

HYPER = {"hidden": 8, "rate": 1e-3, "name": "net", "options": {"layers": [1, 2, None]}, "on": True}


def lightning(path: Path, state: State, hyper: Any = HYPER, **more: Any) -> Path:
    """Write what Lightning's trainer saves of a module."""
    content = {
        "epoch": 3,
        "global_step": 12,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"model.{name}": value for name, value in state.items()},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": [{"state": {}, "param_groups": []}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": hyper,
        **more,
    }
    torch.save({key: value for key, value in content.items() if value is not None}, path)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two clients, with hyper-parameters of their own."""
    states = independent("mlp", 2)
    return [
        lightning(tmp_path / f"{name}.ckpt", state, HYPER | {"name": name})
        for name, state in zip("ab", states, strict=True)
    ]


def test_the_output_is_what_lightning_loads(runs: list[Path], tmp_path: Path, cli: Cli) -> None:
    output = tmp_path / "g.ckpt"
    cli.done("match", *runs, "-o", output, "--max-growth", "1")
    content = torch.load(output, weights_only=True)
    assert content["hyper_parameters"] == HYPER | {"name": "a"}  # the first client's
    assert content["pytorch-lightning_version"] == "2.5.0"
    assert content["hparams_name"] == "kwargs"
    assert not {"optimizer_states", "loops", "callbacks"} & content.keys()
    first = torch.load(runs[0], weights_only=True)["state_dict"]
    assert {n: t.shape for n, t in content["state_dict"].items()} == {
        n: t.shape for n, t in first.items()
    }
    assert "equal" in cli.done("verify", output, *runs).out
    again = tmp_path / "again.ckpt"
    cli.done("match", output, runs[1], "-o", again, "--method", "average")
    assert torch.load(again, weights_only=True)["hyper_parameters"]["name"] == "a"
    assert set(record_of(output)["tensors"]) == set(content["state_dict"])


def test_the_first_clients_alone_must_be_lightnings(
    runs: list[Path], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    average = ("--method", "average")
    other = tmp_path / "b.pt"
    torch.save(torch.load(runs[1], weights_only=True)["state_dict"], other)
    cli.done("match", runs[0], other, "-o", tmp_path / "g.ckpt", *average)
    command = ("match", other, runs[0], "-o", tmp_path / "h.ckpt", *average)
    cli.refused(*command, code=2, says=["b is no Lightning checkpoint", "end in .pt"])
    assert not (tmp_path / "h.ckpt").exists()


def test_modules_without_hyper_parameters_are_written_too(tmp_path: Path, cli: Cli) -> None:
    states = independent("mlp", 2)
    runs = [
        lightning(tmp_path / f"{name}.ckpt", state, None, hparams_name=None)
        for name, state in zip("ab", states, strict=True)
    ]
    cli.done("match", *runs, "-o", tmp_path / "g.ckpt")
    assert "hyper_parameters" not in torch.load(tmp_path / "g.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("dials", "taken", "written"), [((), 0, "g.ckpt"), (("--set", "weights=raw"), 1, "g.pt")]
)
def test_averages_that_callbacks_kept_are_what_lightning_would_load(
    dials: tuple[str, ...], taken: int, written: str, tmp_path: Path, cli: Cli
) -> None:
    """Lightning's `WeightAveraging` saves the average as the state dict, and the weights beside."""
    pairs = [
        independent("mlp", 2),
        independent("mlp", 2, first_seed=20),
    ]  # averages, and in training
    runs = []
    for name, state, other in zip("ab", *pairs, strict=True):
        beside = {f"model.{key}": value for key, value in other.items()}
        more = {"current_model_state": beside, "averaging_state": {"n_averaged": torch.tensor(7)}}
        more |= {"callbacks": {"ModelCheckpoint": {"best_model_path": "a.ckpt"}}}
        runs.append(lightning(tmp_path / f"{name}.ckpt", state, **more))
    output = tmp_path / written
    cli.done("match", *runs, "-o", output, "--method", "average", *dials)
    found = torch.load(output, weights_only=True)
    assert not {"current_model_state", "averaging_state", "callbacks"} & found.keys()
    state = found.get("state_dict", found)
    for name, value in pairs[taken][0].items():
        mean = (value + pairs[taken][1][name]) / 2
        assert torch.allclose(state[f"model.{name}"], mean)
    assert "'current_model_state'" in cli.done("inspect", runs[0]).out


def recursive() -> list[Any]:
    """Return a list that holds itself."""
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    ("hyper", "allowed", "says"),
    [
        ({"loss": Namespace(a=1)}, "argparse.Namespace", "'hyper_parameters.loss' (argparse.N"),
        ({"at": [1, torch.ones(2)]}, None, "'hyper_parameters.at[1]' (StoredTensor)"),
        ({"deep": recursive()}, None, "too many hyper-parameters"),
        ({"long": list(range(100_001))}, None, "too many hyper-parameters"),
    ],
)
def test_hyper_parameters_that_are_no_plain_values_are_refused(
    hyper: Any, allowed: str | None, says: str, tmp_path: Path, cli: Cli
) -> None:
    state = ZOO["mlp"].fresh(seed=1).state_dict()
    runs = [lightning(tmp_path / f"{name}.ckpt", state, hyper) for name in "ab"]
    trust = () if allowed is None else ("--allow-global", allowed)
    refused = ("match", *runs, "-o", tmp_path / "g.ckpt", *trust)
    cli.refused(*refused, code=2, says=["no Lightning checkpoint can be written", says])
    cli.done("match", *runs, "-o", tmp_path / "g.pt", *trust)
