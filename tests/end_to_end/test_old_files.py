"""Files from before torch 0.4.1: batch norms without their counters, which torch does without."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from tests.end_to_end.helpers import Cli

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))


class Renamed(Net):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.last = self.conv, self.bn, self.head
        del self.conv, self.bn, self.head

    def forward(self, x):
        return self.last(self.norm(self.stem(x)).relu().mean((2, 3)))

"""
COUNTER = "bn.num_batches_tracked"


def built() -> nn.Module:
    """Return the net of the code."""
    space: dict[str, type[nn.Module]] = {}
    exec(CODE, space)
    return space["Net"]()


def state_of(seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a net whose statistics are not the default ones."""
    torch.manual_seed(seed)
    net = built().train()
    with torch.no_grad():
        net(torch.randn(8, 1, 6, 6))
    return dict(net.state_dict())


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    """Clients without counters, one with, shards and data."""
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "shards").mkdir()
    for seed, name in enumerate("ab"):
        state = state_of(seed)
        torch.save(state, tmp_path / f"new-{name}.pt")
        del state[COUNTER]
        torch.save(
            {"state_dict": {f"module.{n}": t for n, t in state.items()}}, tmp_path / f"{name}.pt"
        )
    rng = np.random.default_rng(0)
    for path in ("shards/a.npz", "shards/b.npz", "test.npz"):
        x = rng.normal(size=(12, 1, 6, 6)).astype(np.float32)
        np.savez(tmp_path / path, x=x, y=rng.integers(0, 3, 12))
    return tmp_path


def model(scene: Path, name: str = "Net") -> list[str]:
    return ["--model", f"{scene / 'net.py'}:{name}", "--input-shape", "2,1,6,6"]


def clients(scene: Path, *names: str) -> list[Path]:
    return [scene / f"{name}.pt" for name in names or ("a", "b")]


@pytest.mark.parametrize("name", ["Net", "Renamed"])
def test_a_merge_with_code_keeps_the_clients_names(name: str, scene: Path, cli: Cli) -> None:
    merged = scene / "g.pt"
    cli.done("match", *clients(scene), *model(scene, name), "-o", merged, "--set", "probe_count=20")
    state = torch.load(merged, weights_only=True)
    assert set(state) == set(state_of(0)) - {COUNTER}
    cli.done("verify", merged, *clients(scene), *model(scene, name))


def test_files_without_counters_merge_as_those_with(scene: Path, cli: Cli) -> None:
    options = (*model(scene), "--set", "probe_count=20")
    cli.done("match", *clients(scene), *options, "-o", scene / "old.pt")
    cli.done("match", *clients(scene, "new-a", "new-b"), *options, "-o", scene / "new.pt")
    old, new = (torch.load(scene / f"{n}.pt", weights_only=True) for n in ("old", "new"))
    assert COUNTER in new
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name])


@pytest.mark.parametrize(
    "order", [("a", "new-b"), pytest.param(("new-a", "b"), marks=pytest.mark.slow)]
)
def test_clients_with_and_without_counters_merge(
    order: tuple[str, str], scene: Path, cli: Cli
) -> None:
    cli.done("match", *clients(scene, *order), *model(scene), "-o", scene / "g.pt")
    written = torch.load(scene / "g.pt", weights_only=True)
    assert (COUNTER in written) == (order[0] == "new-a")


def test_they_are_evaluated_and_compared_as_those_with(scene: Path, cli: Cli) -> None:
    options = ("--data", scene / "test.npz", "--device", "cpu", "--json")
    pairs = (*clients(scene, "a", "new-a"), *model(scene)[:2], *options)
    old, new = cli.done("eval", *pairs).json["models"]
    assert {**old, "model": ""} == {**new, "model": ""}
    shown = cli.done("compare", *clients(scene), *model(scene)[:2], *options).json["rows"]
    assert next(row["loss"] for row in shown if row["kind"] == "client") == old["loss"]


@pytest.mark.parametrize("method", ["fedma", "fedavg"])
def test_they_are_trained_in_rounds(method: str, scene: Path, cli: Cli) -> None:
    options = ["--shards", scene / "shards", "--method", method, "--epochs", 1, "--device", "cpu"]
    cli.done(
        *("retrain", *clients(scene), *model(scene), *options, "--data", scene / "test.npz"),
        *("-o", scene / "r.pt"),
    )
    assert set(torch.load(scene / "r.pt", weights_only=True)) == set(state_of(0)) - {COUNTER}


@pytest.mark.slow
def test_they_are_exported_reported_and_loaded(scene: Path, cli: Cli) -> None:
    cli.done("match", *clients(scene), *model(scene), "--max-growth", 1, "-o", scene / "g.pt")
    cli.done("export", scene / "g.pt", *model(scene), "-o", scene / "g.pt2")
    image = ("--image", scene / "test.npz")
    page = ("-o", scene / "page.html")
    cli.done("report", scene / "g.pt", *clients(scene), *model(scene), *image, *page)
    net = fedmerge.load_model(built, scene / "a.pt")
    expected = built()
    expected.load_state_dict(state_of(0))
    x = torch.randn(4, 1, 6, 6)
    assert torch.equal(net.eval()(x), expected.eval()(x))


def test_what_torch_does_not_do_without_is_still_refused(scene: Path, cli: Cli) -> None:
    for name in "ab":
        state = torch.load(scene / f"new-{name}.pt", weights_only=True)
        del state["bn.running_mean"]
        torch.save(state, scene / f"{name}.pt")
    command = ("match", *clients(scene), *model(scene), "-o", scene / "g.pt")
    cli.refused(*command, code=3, says=["a: has no tensor 'bn.running_mean'"])


STRICT = (
    CODE
    + '''

class Strict(Net):
    """Takes no file without its counter."""

    def load_state_dict(self, state, *args, **kwargs):
        found = super().load_state_dict(state, *args, **kwargs)
        if "bn.num_batches_tracked" not in state:
            found.missing_keys.append("bn.num_batches_tracked")
        return found
'''
)


def test_a_model_s_own_way_of_loading_decides(scene: Path, cli: Cli) -> None:
    (scene / "net.py").write_text(STRICT)
    command = ("plan", scene / "a.pt", *model(scene, "Strict"), "--json")
    refused = cli.refused(*command, code=3, says=["a: has no tensor 'bn.num_batches_tracked'"])
    assert json.loads(refused.out)["error"]["kind"] == "ArchitectureError"
    cli.done("plan", scene / "new-a.pt", *model(scene, "Strict"))
