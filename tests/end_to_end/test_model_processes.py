"""Model code through real processes: plan, match, verify and export as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.architecture import solve_widths
from fedmerge.architecture.from_code import permuted, plan_model, random_moves
from fedmerge.cli import run
from tests.end_to_end.helpers import PATIENCE, process

pytestmark = pytest.mark.slow

CLOSE = 1e-5  # float32, relative to outputs of about 1
CODE = """
from torch import nn
from torch.nn import functional as fn


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = fn.relu(self.norm(self.stem(x)))
        return self.head((x + fn.relu(self.mid(x))).mean((2, 3)))


def build(width=6):
    return Net(width)
"""
WITHOUT_FEDMERGE = """
import sys
import torch
program = torch.export.load(sys.argv[1]).module()
torch.save(program(torch.load(sys.argv[2], weights_only=True)).detach(), sys.argv[3])
print("fedmerge" in sys.modules)
"""
INPUT = ["--input-shape", "2,1,8,8"]


def build() -> nn.Module:
    """Return the net of the code above."""
    namespace: dict[str, type[nn.Module]] = {"__name__": "net"}  # type: ignore[dict-item]
    exec(CODE, namespace)
    return namespace["build"]().eval()


def images() -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the code, two clients (one net, its units in another order)."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "net.py").write_text(CODE)
    torch.manual_seed(3)
    net = build()
    plan = plan_model(net, (images(),))
    shapes = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    widths = solve_widths(plan, shapes, source="net")
    moves = random_moves(plan, widths, np.random.default_rng(1))
    torch.save(net.state_dict(), folder / "a.pt")
    torch.save(permuted(net, plan, moves, widths).state_dict(), folder / "b.pt")
    return folder


@pytest.fixture(scope="module")
def merged(folder: Path) -> Path:
    """Return what a process made of the clients."""
    words = ["match", "a.pt", "b.pt", "--model", "net.py:build", *INPUT, "-o", "global.pt"]
    done = process(*words, "--json", cwd=folder)
    assert done.code == 0, done.err
    assert done.json["growth"] == 1
    return folder / "global.pt"


def expected(folder: Path) -> Tensor:
    """Return the first client's outputs."""
    net = build()
    net.load_state_dict(torch.load(folder / "a.pt", weights_only=True))
    with torch.no_grad():
        out: Tensor = net(images())
    return out


def test_plan_prints_the_groups_and_what_pinned_the_rest(folder: Path) -> None:
    done = process("plan", "a.pt", "--model", "net.py:build", *INPUT, cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[:3] == [
        "Net: 1 group",
        "  group  width  can grow  tensors[axis]",
        "  stem       6  yes       stem.weight[0], stem.bias[0], norm.weight[0], norm.bias[0], "
        "norm.running_mean[0], norm.running_var[0], mid.weight[0], mid.weight[1], mid.bias[0], "
        "head.weight[1]",
    ]
    assert done.out.splitlines()[3:] == [
        "pinned (pixels, by convolution or pooling): stem.weight[2,3], mid.weight[2,3]",
        "pinned (output): head.weight[0], head.bias[0]",
    ]


def test_a_merge_loads_into_the_code_and_is_the_clients_function(
    folder: Path, merged: Path
) -> None:
    net = fedmerge.load_model(build, merged).eval()
    with torch.no_grad():
        assert torch.allclose(net(images()), expected(folder), atol=CLOSE)
        assert not torch.allclose(build()(images()), expected(folder), atol=1e-2)


def test_verify_runs_the_model_and_notices_other_clients(folder: Path, merged: Path) -> None:
    words = ["--model", f"{folder / 'net.py'}:build", *INPUT, "--json"]
    done = process("verify", merged, folder / "a.pt", folder / "b.pt", *words)
    assert done.code == 0, done.err
    torch.save({k: t + 1 for k, t in torch.load(folder / "a.pt").items()}, folder / "other.pt")
    others = [str(folder / "other.pt"), str(folder / "b.pt")]
    assert run(["verify", str(merged), *others, *words]) == 1


def test_an_exported_program_runs_where_fedmerge_is_not_imported(
    folder: Path, merged: Path
) -> None:
    words = ["export", "global.pt", "--model", "net.py:build", *INPUT, "-o", "global.pt2"]
    done = process(*words, "--json", cwd=folder)
    assert done.code == 0, done.err
    assert done.json["difference"] <= CLOSE
    torch.save(images(), folder / "x.pt")
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_FEDMERGE, "global.pt2", "x.pt", "y.pt"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=PATIENCE,
    )
    assert (ran.returncode, ran.stdout) == (0, "False\n"), ran.stderr
    assert torch.allclose(torch.load(folder / "y.pt"), expected(folder), atol=CLOSE)


def test_an_onnx_file_agrees_with_the_merged_model(
    folder: Path, merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = import_module("onnxruntime")  # without type hints
    words = ["export", str(merged), "--model", f"{folder / 'net.py'}:build", *INPUT]
    assert run([*words, "-o", str(folder / "global.onnx"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "onnx"
    session = runtime.InferenceSession(str(folder / "global.onnx"))
    found = session.run(None, {session.get_inputs()[0].name: images().numpy()})[0]
    assert np.allclose(found, expected(folder).numpy(), atol=CLOSE)
