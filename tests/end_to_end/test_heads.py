"""Merging attention: heads as units, through the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.architecture import ModelCode, resize_module
from fedmerge.checkpoint import open_checkpoint
from fedmerge.cli import run
from fedmerge.federated import RetrainOptions, open_start
from fedmerge.merging import record_from_json
from fedmerge.report import group_views
from tests.end_to_end.helpers import record_of
from tests.end_to_end.test_model_code import arguments, generic, outputs
from tests.model_zoo import ZOO

TIGHT = 1e-9  # float64
VIT, GROWING = "vit", "attention with growing heads"
COUNTED = "attention that counts its heads"


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Let models build and run in float64, also what they make inside."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def saved(folder: Path, **modules: nn.Module) -> list[str]:
    """Save models under their names."""
    files = []
    for name, module in modules.items():
        files.append(str(folder / f"{name}.pt"))
        torch.save(module.state_dict(), files[-1])
    return files


def merged(name: str, path: Path) -> nn.Module:
    """Return a merged file as a model."""
    module = ZOO[name].build().eval()
    checkpoint = open_checkpoint(path)
    state = {n: checkpoint.read_torch(n) for n in checkpoint.tensors}
    resize_module(module, {n: tuple(t.shape) for n, t in state.items()})
    module.load_state_dict(state)
    return module


def turned_heads(net: nn.Module, *, seed: int) -> nn.Module:
    """Return a ViT of the same function: heads swapped, each one's units in an order of its own."""
    rng = np.random.default_rng(seed)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for block in range(2):
        qkv, proj = (f"blocks.{block}.attention.{name}" for name in ("qkv", "proj.weight"))
        inside = [[rng.permutation(4) for _ in range(2)] for _ in range(2)]  # queries, values
        for leaf in ("weight", "bias"):
            parts = state[f"{qkv}.{leaf}"].unflatten(0, (3, 2, 4)).clone()
            for k in range(3):
                parts[k] = torch.stack([parts[k][1 - h][inside[k // 2][h]] for h in range(2)])
            state[f"{qkv}.{leaf}"] = parts.flatten(0, 2)
        read = state[proj].unflatten(1, (2, 4))
        read = torch.stack([read[:, 1 - h][:, inside[1][h]] for h in range(2)], 1)
        state[proj] = read.flatten(1)
    turned = ZOO[VIT].build().eval()
    turned.load_state_dict(state)
    return turned


def test_nets_whose_heads_have_orders_of_their_own_merge_back_to_the_function(
    tmp_path: Path,
) -> None:
    net = generic(ZOO[VIT], seed=1)
    turned = turned_heads(net, seed=0)
    expected = outputs(net, ZOO[VIT])
    assert torch.allclose(outputs(turned, ZOO[VIT]), expected, atol=1e-9)
    files = saved(tmp_path, one=net, two=turned)
    target = tmp_path / "global.pt"
    by_weights = ["--set", "probe=none"]
    assert run(["match", *files, *arguments(VIT), *by_weights, "-o", str(target), "-q"]) == 0
    found = record_of(target)["assignments"]
    for block in range(2):
        group = f"blocks.{block}.attention.qkv.heads"
        assert found["one"][group] == found["two"][group][::-1]
        for inner in ("qkv", "qkv-2"):
            rows = found["two"][f"blocks.{block}.attention.{inner}"]
            assert rows[0] != rows[1]
    assert torch.allclose(outputs(merged(VIT, target), ZOO[VIT]), expected, atol=TIGHT)
    assert run(["verify", str(target), *files, *arguments(VIT), "-q"]) == 0
    record = json.dumps(record_of(target))
    assert '"inside": "blocks.0.attention.qkv.heads"' in record


def test_with_one_order_for_all_heads_the_merge_is_another_function(tmp_path: Path) -> None:
    net = generic(ZOO[VIT], seed=1)
    files = saved(tmp_path, one=net, two=turned_heads(net, seed=0))
    plan, target = tmp_path / "plan.json", tmp_path / "global.pt"
    assert run(["plan", *files, *arguments(VIT), "-o", str(plan), "-q"]) == 0
    written = json.loads(plan.read_text())
    inner = [group.pop("inside") for group in written["groups"] if "inside" in group]
    assert len(inner) == 4
    plan.write_text(json.dumps(written))  # as it was before groups could be inside others
    options = [*arguments(VIT), "--plan", str(plan), "--set", "probe=none"]
    assert run(["match", *files, *options, "-o", str(target), "-q"]) == 0
    result = outputs(merged(VIT, target), ZOO[VIT])
    assert result.isfinite().all()
    assert not torch.allclose(result, outputs(net, ZOO[VIT]), atol=1e-3)
    assert run(["verify", str(target), *files, *arguments(VIT), "-q"]) == 0


def turned_and_merged(folder: Path, *options: str) -> tuple[list[str], Path]:
    """Return a ViT and one of the same function with other orders as files, and their merge."""
    net = generic(ZOO[VIT], seed=1)
    files = saved(folder, one=net, two=turned_heads(net, seed=0))
    target = folder / "global.pt"
    assert run(["match", *files, *arguments(VIT), *options, "-o", str(target), "-q"]) == 0
    return files, target


INNER = "blocks.0.attention.qkv"
EDITS: dict[str, tuple[Callable[[list[list[int]]], object], str]] = {
    "unit twice": (lambda rows: [rows[0], [0, 0, 2, 3]], "gives two units the same global unit"),
    "out of range": (lambda rows: [rows[0], [1, 2, 3, 4]], "leaves the range of 0 to 3"),
    "row missing": (lambda rows: rows[:1], "has 1 rows, expected 2"),
    "ragged": (lambda rows: [rows[0], [0, 1]], "rows of different lengths"),
    "no row": (lambda rows: [rows[0], 3], "rows of different lengths"),
    "narrower": (lambda rows: [[0, 1], [1, 0]], "has 2 units, its recorded width is 4"),
    "another order": (lambda rows: [rows[0][::-1], rows[1]], "recorded SHA-256|not what"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_record_of_heads_that_was_edited_is_found(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, target = turned_and_merged(tmp_path, "--set", "probe=none")
    change, says = EDITS[name]
    record = record_of(target)
    rows = record["assignments"]["two"][INNER]
    record["assignments"]["two"][INNER] = change(rows)
    Path(f"{target}.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert run(["verify", str(target), *files]) != 0
    told = " ".join("".join(capsys.readouterr()).split())
    assert re.search(says, told), told


def test_an_average_of_heads_is_recorded_and_recomputed(tmp_path: Path) -> None:
    files = saved(tmp_path, one=generic(ZOO[VIT], seed=1))
    plan = str(tmp_path / "plan.json")
    assert run(["plan", *files, *arguments(VIT), "-o", plan, "-q"]) == 0
    files, target = turned_and_merged(tmp_path, "--method", "average", "--plan", plan)
    assert record_of(target)["assignments"]["two"][INNER] == [0, 1, 2, 3]  # in all heads
    assert run(["verify", str(target), *files, *arguments(VIT), "-q"]) == 0
    page = tmp_path / "page.html"
    assert run(["report", str(target), "-o", str(page), "-q"]) == 0


def test_a_report_of_heads_counts_units_over_all_of_them(tmp_path: Path) -> None:
    _, target = turned_and_merged(tmp_path, "--set", "probe=none")
    views = {
        view.name: view
        for view in group_views(record_from_json(record_of(target), source="global.pt"))
    }
    assert views[INNER].owners == (0, 2 * 4)
    assert len(views[INNER].similarities) == 2 * 2 * 4
    assert len(views[INNER].matches) == 2 * 4
    assert (views[INNER].width, views[INNER].inside) == (4, f"{INNER}.heads")
    page = tmp_path / "page.html"
    assert run(["report", str(target), "-o", str(page), "-q"]) == 0
    assert f"4 in each of {INNER}.heads" in page.read_text()


def test_plan_says_which_units_have_another_order_in_every_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = saved(tmp_path, one=generic(ZOO[VIT], seed=1))
    assert run(["plan", *files, *arguments(VIT)]) == 0
    assert f"in another order in each of {INNER}.heads: {INNER}, {INNER}-2" in (
        capsys.readouterr().out
    )


def test_in_rounds_units_have_one_order_and_go_on_from_the_file_s(tmp_path: Path) -> None:
    _, target = turned_and_merged(tmp_path, "--set", "probe=none")
    start = open_start([str(target)], ["one", "two"], ModelCode(ZOO[VIT].build), RetrainOptions())
    expected = outputs(merged(VIT, target), ZOO[VIT])
    states = [{n: c.read_torch(n) for n in c.tensors} for c in start.clients]
    for state in states:
        client = ZOO[VIT].build().eval()
        client.load_state_dict(state)
        assert torch.allclose(outputs(client, ZOO[VIT]), expected, atol=TIGHT)
    heads = [state[f"{INNER}.weight"].reshape(3, 2, 4, -1) for state in states]
    assert torch.equal(heads[0], heads[1].flip(1))  # heads in each one's own order, units not


@pytest.mark.parametrize(
    ("name", "out", "shape"),
    [(GROWING, "out.weight", (12, 18)), (COUNTED, "attention.out.weight", (12, 24))],
)
def test_independent_attention_layers_kept_apart_are_their_ensemble(
    name: str, out: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    nets = [generic(ZOO[name], seed) for seed in range(2)]
    files = saved(tmp_path, one=nets[0], two=nets[1])
    target = tmp_path / "global.pt"
    options = ["--set", "match_threshold=1", "--max-growth", "none"]
    assert run(["match", *files, *arguments(name), *options, "-o", str(target), "-q"]) == 0
    module = merged(name, target)
    assert module.get_parameter(out).shape == shape  # twice the stream, twice the heads
    mean = torch.stack([outputs(net, ZOO[name]) for net in nets]).mean(0)
    assert torch.allclose(outputs(module, ZOO[name]), mean, atol=TIGHT)
    assert not torch.allclose(outputs(nets[0], ZOO[name]), mean, atol=1e-2)
    assert run(["verify", str(target), *files, *arguments(name), "-q"]) == 0
    model = fedmerge.load_model(ZOO[name].build, target)
    assert torch.allclose(outputs(model.eval(), ZOO[name]), mean, atol=TIGHT)


def with_silent_head(net: nn.Module) -> nn.Module:
    """Return the net with a fourth head that nothing reads."""
    grown = ZOO[GROWING].build().eval()
    shapes = {"qkv.weight": (44, 6), "qkv.bias": (44,), "out.weight": (6, 12)}
    resize_module(grown, shapes)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    for name in ("qkv.weight", "qkv.bias"):
        rows = torch.randn((11, *state[name].shape[1:]), generator=generator)
        state[name] = torch.cat([state[name], rows])
    state["out.weight"] = torch.cat([state["out.weight"], torch.zeros(6, 3)], 1)
    grown.load_state_dict(state)
    return grown


def test_clients_with_different_numbers_of_heads_merge_by_the_plan_in_the_record(
    tmp_path: Path,
) -> None:
    net = generic(ZOO[GROWING], seed=1)
    wider = with_silent_head(net)
    expected = outputs(net, ZOO[GROWING])
    assert torch.allclose(outputs(wider, ZOO[GROWING]), expected, atol=1e-9)
    files = saved(tmp_path, one=net, two=wider)
    target, plan = tmp_path / "global.pt", tmp_path / "plan.json"
    assert run(["plan", *files, *arguments(GROWING), "-o", str(plan), "-q"]) == 0
    assert run(["match", *files, "--plan", str(plan), "-o", str(target), "-q"]) == 0
    found = record_of(target)["assignments"]
    assert sorted(found["two"]["qkv.heads"]) == [0, 1, 2, 3]
    assert found["two"]["qkv.heads"][:3] == found["one"]["qkv.heads"]
    assert torch.allclose(outputs(merged(GROWING, target), ZOO[GROWING]), expected, atol=1e-9)
    assert run(["verify", str(target), *files, "-q"]) == 0
    model = fedmerge.load_model(ZOO[GROWING].build, target)
    assert torch.allclose(outputs(model.eval(), ZOO[GROWING]), expected, atol=1e-9)


def test_files_of_another_width_take_the_number_of_heads_of_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    files = saved(tmp_path, one=WiderEncoder(), two=WiderEncoder())
    shape = ["--input-shape", "2,4,16"]
    options = ["--model", f"{__name__}:Encoder", *shape]
    assert run(["plan", *files, *options, "--json"]) == 0
    groups = {g["name"]: g for g in json.loads(capsys.readouterr().out)["groups"]}
    assert groups["layer.self_attn.in_proj.heads"]["width"] == 2
    assert "can_grow" not in groups["layer.linear1"]


class Encoder(nn.Module):
    """The factory that the command line is given, 8 wide."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(self.width, 2, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class WiderEncoder(Encoder):
    """The clients' nets."""

    width = 16
