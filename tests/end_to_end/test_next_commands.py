"""What is printed as the next command runs as it is printed."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.cli import COMMANDS
from tests.end_to_end.helpers import Cli, Outcome

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, name="x"):
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), nn.LayerNorm(width)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x.flatten(1))).relu())
"""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints that nobody reads without several options, and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my net.py").write_text(NET)
    for seed, name in enumerate(("-a", "b b")):
        torch.manual_seed(seed)
        layers = {"first": nn.Linear(6, 5), "norm": nn.LayerNorm(5), "last": nn.Linear(5, 3)}
        state = nn.ModuleDict(layers).state_dict()
        other = {key: value + 1 for key, value in state.items()}
        content = {"nets": {"G": state, "D": other}, "args": Namespace(lr=seed)}
        torch.save(content, tmp_path / f"{name}.ckpt")
    rng = np.random.default_rng(0)
    np.savez("test.npz", x=rng.normal(size=(8, 2, 3)).astype("f"), y=np.arange(8) % 3)
    return tmp_path


OPTIONS = (
    *("--model", "my net.py:Net", "--model-arg", "width=5", "--model-arg", "name='y z'"),
    *("--input-shape", "2,2,3", "--key", "nets.G", "--allow-global", "argparse.Namespace"),
    *("--set", "input_dtype=float32", "--keep", "last*"),
)


def printed(outcome: Outcome, name: str) -> list[str]:
    """Return the words of a suggested command, without the program's own."""
    found = re.findall(rf"fedmerge {name} .*$", outcome.out, re.M)
    assert len(found) == 1, outcome.out
    return shlex.split(found[0])[1:]


@pytest.mark.parametrize("method", [(), ("--method", "average")])
def test_suggested_commands_run_as_they_are_printed(
    method: tuple[str, ...], scene: Path, cli: Cli
) -> None:
    given = ("match", "./-a.ckpt", "b b.ckpt", "-o", "the merge.pt", *OPTIONS, *method)
    outcome = cli.done(*given)
    assert "equal" in cli.done(*printed(outcome, "verify")).out
    measure = [word if word != "FILE" else "test.npz" for word in printed(outcome, "compare")]
    rows = cli.done(*measure, "--json").json["rows"]
    assert "global" in {row["kind"] for row in rows}
    for option in ("--model-arg", "--allow-global", "--key", "--input-shape"):
        place = measure.index(option)
        shortened = [*measure[:place], *measure[place + 2 :]]
        if option != "--input-shape":  # data tell it as well
            assert cli(*shortened).code != 0, option


def test_without_a_model_its_place_is_shown(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    outcome = cli.done("match", *nets, "-o", tmp_path / "g.pt")
    words = printed(outcome, "compare")
    assert words[words.index("--model") :] == ["--model", "M", "--data", "FILE"]
    assert printed(outcome, "verify") == ["verify", str(tmp_path / "g.pt"), *map(str, nets)]


def test_options_are_typed_as_the_next_command_takes_them() -> None:
    given = {
        "match_by_order": True,
        "channels_last": True,
        "weights": "ema",
        "plan": '{"groups": []}',  # a record's, which no command line has
        "normalize": "-0.5/0.5",
        "keep": ["a*", "b"],
        "model_arg": None,
        "dtype": None,
    }
    names = tuple(given)
    assert COMMANDS["compare"].suggested([Path("-x.pt")], given, names) == (
        "fedmerge compare ./-x.pt --set match_by_order=true --channels-last --set weights=ema "
        "--normalize=-0.5/0.5 --keep 'a*' --keep b"
    )
    assert COMMANDS["verify"].suggested([Path("x.pt")], given, names) == "fedmerge verify x.pt"


class Pairs(nn.Module):
    """Tokens and numbers, whose shapes no layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.hidden, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        mixed = (weights @ self.embed(tokens)).mean(1)
        logits: Tensor = self.last(self.hidden(self.mix(mixed)).relu())
        return logits


def test_an_exported_model_is_fed_as_it_was_exported(tmp_path: Path, cli: Cli) -> None:
    torch.manual_seed(0)
    nets = [Pairs().eval(), Pairs().eval()]
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for net, path in zip(nets, files, strict=True):
        torch.save(net.state_dict(), path)
    example = (torch.randint(9, (2, 5)), torch.randn(2, 3, 5))
    torch.export.save(torch.export.export(nets[0], example), tmp_path / "net.pt2")
    command = ("plan", files[0], "--model", tmp_path / "net.pt2")
    outcome = cli.done(*command)
    assert "random inputs of shape 2×5, 2×3×5" in outcome.err
    assert "hidden" in outcome.out
    told = cli(*command, "--input-shape", "2,5")  # the user says otherwise
    assert told.code != 0
