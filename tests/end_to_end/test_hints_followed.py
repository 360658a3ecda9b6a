"""A hint is followed to the letter, and the command then works."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.end_to_end.helpers import Cli, error_lines


def net(hidden: int, *, outputs: int = 3, first: str = "a", last: str = "b") -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(hidden)
    return {
        f"{first}.weight": torch.randn(hidden, 4, generator=draw),
        f"{last}.weight": torch.randn(outputs, hidden, generator=draw),
    }


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of every kind that is refused at first, in the current folder."""
    wide, square = net(8), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    named: dict[str, object] = {
        "plain": net(5),
        "exists": net(5),
        "renamed": net(5, first="x", last="y"),
        "other": net(5, outputs=4),
        "two-nets": {"gen": net(5), "dis": net(5)},
        "arguments": {"model": net(5), "args": argparse.Namespace(x=1)},
        "square": {"a.weight": wide["a.weight"], "m.weight": square, "b.weight": wide["b.weight"]},
    }
    for name, value in named.items():
        torch.save(value, tmp_path / f"{name}.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "followed"),
    [
        ("match two-nets.pt two-nets.pt -o out.pt", "--key gen"),
        ("match square.pt square.pt -o out.pt", "--assume-chain"),
        ("match plain.pt renamed.pt -o out.pt", "--set match_by_order=true"),
        ("match arguments.pt arguments.pt -o out.pt", "--allow-global argparse.Namespace"),
        ("match plain.pt plain.pt -o exists.pt", "--force"),
    ],
)
def test_the_option_of_a_hint_makes_the_same_command_work(
    command: str, followed: str, files: Path, cli: Cli
) -> None:
    refused = cli(*command.split())
    assert refused.code != 0
    assert followed in error_lines(refused.err)[1]
    cli.done(*command.split(), *followed.split())


@pytest.mark.parametrize(
    "command",
    ["match plain.pt other.pt -o out.pt", "match plain.pt plain.pt --wrong", "mtach", "match"],
)
def test_the_command_of_a_hint_works(command: str, files: Path, cli: Cli) -> None:
    hint = error_lines(cli(*command.split()).err)[1]
    (named,) = re.findall("`fedmerge ([^`]+)`", hint)
    clients = [] if "--help" in named else ["plain.pt", "other.pt"]
    assert cli.done(*shlex.split(named), *clients).out
