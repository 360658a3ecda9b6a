"""Exported programs and TorchScript archives as clients."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedmerge.architecture.from_code import permuted, plan_model
from fedmerge.values import Plan
from tests.end_to_end.helpers import TIGHT, Cli, load, process
from tests.end_to_end.malice import Payload
from tests.unit.checkpoint.archives import changed, in_json, save_exported, save_scripted

INPUT = torch.linspace(-1, 1, 2 * 64, dtype=torch.float64).reshape(2, 1, 8, 8)


class Residual(nn.Module):
    """What no file's names tell: a skip, which ties the units of three layers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.outer = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.outer(self.inner(x).relu())
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Chain(nn.Module):
    """A plain chain, which names alone tell."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 7, 3)
        self.fc1, self.fc2 = nn.Linear(7 * 16, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).relu().flatten(1)
        out: Tensor = self.fc2(self.fc1(x).relu())
        return out


def fresh(build: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build().double().eval()


def shuffled(model: nn.Module, plan: Plan, seed: int) -> nn.Module:
    rng = np.random.default_rng(seed)
    widths = {
        group.name: next(
            dict(model.state_dict())[name].shape[axis] for name, axis in plan.axes_of(group.name)
        )
        for group in plan.groups
    }
    moves = {group: rng.permutation(width) for group, width in widths.items()}
    return permuted(model, plan, moves, widths)


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(INPUT)
    return result


@pytest.fixture
def programs(tmp_path: Path) -> tuple[nn.Module, list[Path]]:
    """A residual net and permuted copies of it as exported programs."""
    model = fresh(Residual, 1)
    plan = plan_model(model, (INPUT,))
    copies = [model, *(shuffled(model, plan, seed) for seed in (1, 2))]
    return model, [
        save_exported(m, tmp_path / f"{n}.pt2", INPUT) for n, m in zip("abc", copies, strict=True)
    ]


@pytest.mark.slow
def test_permuted_programs_merge_back_to_the_function_by_their_own_graph(
    cli: Cli, programs: tuple[nn.Module, list[Path]], tmp_path: Path
) -> None:
    model, files = programs
    done = cli.done("match", *files, "-o", tmp_path / "g.pt", "--max-growth", "1")
    assert "note: the plan comes from the graph in a's file" in done.err
    assert "of an exported program" in done.out
    merged = Residual().double().eval()
    merged.load_state_dict(load(tmp_path / "g.pt"))
    assert torch.allclose(outputs(merged), outputs(model), rtol=0, atol=TIGHT)
    assert cli("verify", tmp_path / "g.pt", *files).code == 0
    averaged = Residual().double().eval()
    cli.done("match", *files, "-o", tmp_path / "h.pt", "--method", "average")
    averaged.load_state_dict(load(tmp_path / "h.pt"))
    assert not torch.allclose(outputs(averaged), outputs(model), rtol=0, atol=1e-3)


def test_names_alone_would_not_have_told_the_skip(
    cli: Cli, programs: tuple[nn.Module, list[Path]], tmp_path: Path
) -> None:
    _, files = programs
    for file in files[:2]:
        cli.done("convert", file, "-o", file.with_suffix(".safetensors"))
    plain = [file.with_suffix(".safetensors") for file in files[:2]]
    cli.refused("match", *plain, "-o", tmp_path / "g.pt", code=3, says=["--model"])


@pytest.mark.slow
def test_programs_of_other_widths_merge_by_the_first_ones_graph(cli: Cli, tmp_path: Path) -> None:
    files = []
    for width in (6, 8):
        torch.manual_seed(width)
        net = Residual(width).double()
        files.append(save_exported(net, tmp_path / f"w{width}.pt2", INPUT))
    done = cli.done("match", *files, "-o", tmp_path / "g.pt", "--json")
    assert [group["client_widths"] for group in done.json["groups"]] == [[6, 8], [6, 8]]


def test_inspect_and_convert_know_both_kinds(cli: Cli, tmp_path: Path) -> None:
    model = fresh(Chain, 1)
    files = [
        save_exported(model, tmp_path / "a.pt2", INPUT),
        save_scripted(model, tmp_path / "b.pt"),
    ]
    shown = cli.done("inspect", *files)
    assert "a.pt2: exported program; 8 tensors" in shown.out
    assert "b.pt: TorchScript; 8 tensors" in shown.out
    assert "the 2 files have the same names, shapes and dtypes" in shown.out
    for file in files:
        cli.done("convert", file, "-o", tmp_path / "x.safetensors", "--force")
        written = load_file(tmp_path / "x.safetensors")
        for name, tensor in model.state_dict().items():
            assert torch.equal(written[name], tensor)


@pytest.mark.parametrize("is_traced", [False, True])
def test_permuted_torchscript_clients_merge_back_to_the_function(
    cli: Cli, tmp_path: Path, is_traced: bool
) -> None:
    model = fresh(Chain, 1)
    plan = plan_model(model, (INPUT,))
    copies = [model, *(shuffled(model, plan, seed) for seed in (1, 2))]
    inputs = (INPUT,) if is_traced else ()
    files = [
        save_scripted(m, tmp_path / f"{n}.ts", *inputs) for n, m in zip("abc", copies, strict=True)
    ]
    cli.done("match", *files, "-o", tmp_path / "g.pt", "--max-growth", "1")
    merged = Chain().double().eval()
    merged.load_state_dict(load(tmp_path / "g.pt"))
    assert torch.allclose(outputs(merged), outputs(model), rtol=0, atol=TIGHT)


def test_a_graph_that_calls_what_nobody_knows_is_refused_but_its_weights_are_read(
    cli: Cli, tmp_path: Path
) -> None:
    file = save_exported(fresh(Chain, 1), tmp_path / "a.pt2", INPUT)

    def change(program: dict[str, dict[str, dict[str, list[dict[str, str]]]]]) -> None:
        program["graph_module"]["graph"]["nodes"][1]["target"] = "torch.ops.aten.save.default"

    bad = changed(file, tmp_path / "b.pt2", {"models/model.json": in_json(change)})
    says = ["torch.ops.aten.save.default", "--model FILE.pt2"]
    cli.refused("match", bad, file, "-o", tmp_path / "g.pt", code=3, says=says)
    shown = cli.done("inspect", bad)
    assert "not mergeable from its graph alone" in shown.out
    cli.done("convert", bad, "-o", tmp_path / "x.safetensors")


def test_hostile_archives_exit_with_4(cli: Cli, tmp_path: Path) -> None:
    model, payload = fresh(Chain, 1), Payload(tmp_path / "mark")
    content = pickle.dumps(payload, 2)
    scripted = save_scripted(model, tmp_path / "a.pt")
    bad = changed(scripted, tmp_path / "b.pt", {"data.pkl": lambda _: content})
    cli.refused("match", scripted, bad, "-o", tmp_path / "g.pt", code=4)
    program = save_exported(model, tmp_path / "a.pt2", INPUT)
    torch.save(((payload,), {}), tmp_path / "inputs.pt")
    hostile = (tmp_path / "inputs.pt").read_bytes()
    bad = changed(program, tmp_path / "b.pt2", {"sample_inputs/model.pt": lambda _: hostile})
    assert cli("inspect", bad).code == 4
    cli.refused("convert", bad, "-o", tmp_path / "x.safetensors", code=4)
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_a_process_merges_programs(programs: tuple[nn.Module, list[Path]], tmp_path: Path) -> None:
    model, files = programs
    done = process("match", *files[:2], "-o", "g.pt", "--max-growth", "1", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["output"] == "g.pt"
    merged = Residual().double().eval()
    merged.load_state_dict(load(tmp_path / "g.pt"))
    assert torch.allclose(outputs(merged), outputs(model), rtol=0, atol=TIGHT)
