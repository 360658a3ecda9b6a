"""Files of whole modules, whose class nobody has, are clients as state dicts are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.end_to_end.helpers import Cli
from tests.end_to_end.retraining import Scene, make_scene

NOTE = "a pickled module (class gone.Net): tensors read, its code is not run"


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """State dicts a.pt and b.pt, and in `modules` the same two as modules."""
    scene = make_scene(tmp_path)
    gone = ModuleType("gone")
    gone.Net = type("Net", (nn.Sequential,), {"__module__": "gone"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gone", gone)
    (tmp_path / "modules").mkdir()
    for name in "ab":
        net = gone.Net(*(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
        net.load_state_dict(torch.load(tmp_path / f"{name}.pt"))
        torch.save({"model": nn.DataParallel(net)}, tmp_path / "modules" / f"{name}.pt")
    monkeypatch.delitem(sys.modules, "gone")
    return scene


def clients(scene: Scene, folder: str) -> list[Path]:
    return [scene.folder / folder / f"{name}.pt" for name in "ab"]


def test_inspect_says_what_they_are(scene: Scene, cli: Cli) -> None:
    shown = cli.done("inspect", *clients(scene, "modules"))
    assert shown.out.count(f"note: {NOTE}") == 2
    assert "torch zip, state dict at 'model'" in shown.out
    (told, _) = cli.done("inspect", *clients(scene, "modules"), "--json").json["files"]
    assert NOTE in told["notes"]


@pytest.mark.parametrize("with_code", [False, True])
def test_they_merge_as_their_state_dicts(with_code: bool, scene: Scene, cli: Cli) -> None:
    code = ["--model", scene.model, "--set", "probe_count=20"] if with_code else []
    for folder, output in (("", "plain.pt"), ("modules", "merged.pt")):
        cli.done("match", *clients(scene, folder), *code, "-o", scene.folder / output)
    merged, plain = (torch.load(scene.folder / f"{name}.pt") for name in ("merged", "plain"))
    assert list(merged) == list(plain)
    assert all(torch.equal(merged[name], plain[name]) for name in plain)
    cli.done("verify", scene.folder / "merged.pt", *clients(scene, "modules"), *code[:2])


def test_convert_makes_a_state_dict_of_one(scene: Scene, cli: Cli) -> None:
    cli.done("convert", clients(scene, "modules")[0], "-o", scene.folder / "made.pt")
    made, plain = (torch.load(scene.folder / name) for name in ("made.pt", "a.pt"))
    assert list(made) == list(plain)
    assert all(torch.equal(made[name], plain[name]) for name in plain)


def test_they_are_evaluated_and_compared_as_their_state_dicts(scene: Scene, cli: Cli) -> None:
    options = ("--model", scene.model, "--data", scene.data, "--device", "cpu", "--json")
    old, new = cli.done(
        "eval", *clients(scene, "")[:1], *clients(scene, "modules")[:1], *options
    ).json["models"]
    assert {**old, "model": ""} == {**new, "model": ""}
    tables = [
        cli.done("compare", *clients(scene, folder), *options).json["rows"]
        for folder in ("", "modules")
    ]
    assert [row["loss"] for row in tables[0]] == [row["loss"] for row in tables[1]]


def test_they_are_trained_in_rounds(scene: Scene, cli: Cli) -> None:
    shards = scene.folder / "two"
    shards.mkdir()
    for name in "ab":
        (shards / f"{name}.npz").symlink_to(scene.folder / "shards" / f"{name}.npz")
    for folder, output in (("", "plain.pt"), ("modules", "merged.pt")):
        assert cli(*scene.command(output, clients=clients(scene, folder), shards=shards)).code == 0
    merged, plain = (torch.load(scene.folder / f"{name}.pt") for name in ("merged", "plain"))
    assert all(torch.equal(merged[name], plain[name]) for name in plain)
