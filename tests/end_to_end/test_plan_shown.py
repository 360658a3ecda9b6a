"""What `fedmerge plan` prints: short on a terminal, everything with -v and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedmerge.cli import pinned_lines
from fedmerge.values import Concat, Group, Pinned, Plan, Product, TensorPlan, Units
from tests.end_to_end.helpers import Cli

LAYERS = 12


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """Return a chain of convolutions, every width another one."""
    widths = [3, *range(4, 4 + LAYERS)]
    state = {f"{2 * k}.weight": torch.randn(widths[k + 1], widths[k], 3, 3) for k in range(LAYERS)}
    torch.save(state, tmp_path / "a.pt")
    code = "from torch import nn\n\ndef build():\n    layers = []\n"
    code += f"    for k in range({LAYERS}):\n"
    code += "        layers += [nn.Conv2d(max(3, k + 3), k + 4, 3, bias=False), nn.ReLU()]\n"
    (tmp_path / "net.py").write_text(code + "    return nn.Sequential(*layers)\n")
    return tmp_path / "a.pt"


def words(client: Path) -> list[str]:
    shape = ["--input-shape", "1,3,28,28"]
    return ["plan", str(client), "--model", f"{client.parent / 'net.py'}:build", *shape]


def test_long_lists_of_pinned_axes_are_counted_unless_asked_for(client: Path, cli: Cli) -> None:
    short = cli.done(*words(client)).out
    counted = f"{2 * LAYERS} axes of {LAYERS} tensors (-v lists them)"
    assert f"pinned (pixels, by convolution or pooling): {counted}" in short.splitlines()
    listed = ", ".join(f"{2 * k}.weight[2,3]" for k in range(LAYERS))
    full = cli.done(*words(client), "-v").out
    assert f"pinned (pixels, by convolution or pooling): {listed}" in full.splitlines()


def test_a_terminal_gets_a_table_that_fits_and_v_gives_all_axes(
    client: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("fedmerge.cli.output.Terminal.is_drawn", True)
    short = cli.done(*words(client)).out
    table = [line for line in short.splitlines() if line.startswith(("│", "┃"))]
    assert len(table) == LAYERS  # a header, and one line for every group
    assert max(map(len, table)) <= 80
    assert "0.weight[0]" not in short
    assert "0.weight[0]" in cli.done(*words(client), "-v").out


def test_json_is_the_same_whatever_is_shown(
    client: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = cli.done(*words(client), "--json").json
    monkeypatch.setattr("fedmerge.cli.output.Terminal.is_drawn", True)
    drawn = cli.done(*words(client), "--json", "-v").json
    assert json.dumps(piped) == json.dumps(drawn)
    assert len(piped["tensors"]) == LAYERS


def test_parts_of_axes_are_named_by_what_pinned_them() -> None:
    gates = Product((Pinned(4, "gates"), Units("g")))
    axes = Concat((Units("g"), Product((Pinned(2, "groups of a convolution"), Units("g")))))
    plan = Plan(
        groups=(Group("g"),),
        tensors={
            "a": TensorPlan((gates, Pinned(5, "cumsum"))),
            "b": TensorPlan((axes, Pinned(3, "tokens"), Pinned(2))),
        },
    )
    assert list(pinned_lines(plan, None)) == [
        "pinned (cumsum): a[1]",
        "pinned (groups of a convolution): b[0]",
        "pinned (tokens, by embedding): b[1]",
    ]
