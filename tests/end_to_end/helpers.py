"""The command line in-process or as a process, clients as files, and what a refusal looks like."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedmerge.cli import RESULTS, run
from tests.clients import loaded
from tests.schemas import check_json
from tests.zoo import ZOO, Entry
from tests.zoo import run as outputs_of

State = dict[str, Tensor]

TIGHT = 1e-9  # float64: sums of up to a few hundred products
PATIENCE = 300.0  # seconds for a process to start and work on a busy machine
APART = ("--set", "match_threshold=1", "--max-growth", "none")


@dataclass(frozen=True)
class Outcome:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; anything else there is an error."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        assert self.out.count("\n") == 1
        return value

    @property
    def last_line(self) -> str:
        return self.out.splitlines()[-1]


@dataclass(frozen=True)
class Cli:
    """Runs commands in this process."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Outcome:
        self.capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        if "--json" in arguments and captured.out and arguments[0] in RESULTS:
            check_json(f"json-{arguments[0]}", json.loads(captured.out))
        return Outcome(code, captured.out, captured.err)

    def done(self, *arguments: object) -> Outcome:
        """Run a command that must succeed."""
        outcome = self(*arguments)
        assert outcome.code == 0, outcome.err
        return outcome

    def refused(self, *arguments: object, code: int, says: Sequence[str] = ()) -> Outcome:
        """Run a command that must fail with one error line, at most one hint, and no result."""
        outcome = self(*arguments)
        assert outcome.code == code, outcome
        error = error_lines(outcome.err)[0]
        for phrase in says:
            assert phrase in outcome.err, outcome.err
        assert len(error) > len("error: ")
        if "--json" not in [str(argument) for argument in arguments]:
            assert outcome.out == ""
        return outcome


def error_lines(err: str) -> list[str]:
    """Return the error line and the hint line of stderr, which must be the last and only ones."""
    lines = [line for line in err.splitlines() if not line.startswith(("note: ", "warning: "))]
    assert "Traceback" not in err
    assert 1 <= len(lines) <= 2, err
    assert lines[0].startswith("error: "), err
    assert all(line.startswith("hint: ") for line in lines[1:]), err
    return lines


def process(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command as a user does, as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fedmerge", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=dict(env) if env else None,
        timeout=PATIENCE,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def listing(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def save(state: Mapping[str, Tensor], path: Path) -> Path:
    """Write a state dict, as safetensors if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(dict(state), path)
    return path


def save_all(
    states: Sequence[Mapping[str, Tensor]], folder: Path, suffix: str = ".pt"
) -> list[Path]:
    """Write clients as a, b, c, …"""
    return [save(state, folder / f"{chr(97 + k)}{suffix}") for k, state in enumerate(states)]


def load(path: Path) -> State:
    """Read a written model without fedmerge."""
    if path.suffix == ".safetensors":
        return load_file(path)
    state = torch.load(path, weights_only=True)
    assert isinstance(state, dict)
    return state


def record_of(path: Path) -> dict[str, Any]:
    """Read a merge record without fedmerge."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            text = file.metadata()["fedmerge"]
    else:
        text = Path(f"{path}.json").read_text(encoding="utf-8")
    record = json.loads(text)
    assert isinstance(record, dict)
    check_json("record", record)
    return record


def independent(name: str, count: int, first_seed: int = 10) -> list[State]:
    """Return the states of differently initialised models of the zoo."""
    return [dict(ZOO[name].fresh(first_seed + k).state_dict()) for k in range(count)]


def distance(entry: Entry, model: nn.Module, expected: Tensor) -> float:
    """Return how far a model's outputs are from the expected ones, at most."""
    return float((outputs_of(model.double().eval(), entry.inputs()) - expected).abs().max())


def mean_outputs(entry: Entry, states: Sequence[State], weights: Sequence[float] = ()) -> Tensor:
    """Return the (weighted) mean of the clients' outputs."""
    each = torch.stack([outputs_of(loaded(entry, state), entry.inputs()) for state in states])
    shares = torch.tensor(weights or [1.0] * len(states), dtype=torch.float64)
    return torch.einsum("k,k...->...", shares / shares.sum(), each)
