"""Measuring models on data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests import digits
from tests.end_to_end.helpers import Cli, process

MODEL = ("--model", digits.MODEL)


class Chatty(nn.Module):
    """A model that prints when it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward!")
        logits: torch.Tensor = self.fc(x.flatten(1))
        return logits


def test_the_table_has_a_row_per_model(cli: Cli, tmp_path: Path) -> None:
    digits.save_clients(tmp_path)
    data = digits.save_test(tmp_path)
    cli.done("match", tmp_path, "-o", tmp_path / "global.pt")
    files = (tmp_path / "c?.pt", tmp_path / "global.pt")
    outcome = cli.done("eval", *files, *MODEL, "--data", data)
    title, columns, *rows = outcome.out.splitlines()
    assert title == f"classification on {data}"
    assert columns.split() == ["model", "loss", "accuracy", "samples", "parameters"]
    assert [row.split()[0] for row in rows] == ["c1", "c2", "c3", "global"]
    loss, accuracy = digits.quality(digits.logits(digits.client(2)))
    assert rows[1].split() == [
        *("c2", f"{loss:.4f}", f"{100 * accuracy:.1f}", "%"),
        *("597", "1,210"),
    ]
    assert int(rows[3].split()[-1].replace(",", "")) > 1210


def test_json_has_every_number(cli: Cli, tmp_path: Path) -> None:
    [file] = digits.save_clients(tmp_path, 1)
    data = digits.save_test(tmp_path)
    value = cli.done("eval", file, *MODEL, "--data", data, "--json").json
    loss, accuracy = digits.quality(digits.logits(digits.client(1)))
    [model] = value.pop("models")
    assert value == {"schema": 1, "data": str(data), "task": "classification"}
    assert model == {
        "model": "c1",
        "loss": pytest.approx(loss, abs=1e-5),
        "metrics": {"accuracy": pytest.approx(accuracy, abs=1e-9)},
        "samples": 597,
        "parameters": 1210,
    }


def test_what_the_model_prints_is_no_result(cli: Cli, tmp_path: Path) -> None:
    file = digits.save(dict(Chatty().state_dict()), tmp_path / "chatty.pt")
    data = digits.save_test(tmp_path)
    model = ("--model", f"{__name__}:Chatty")
    outcome = cli.done("eval", file, *model, "--data", data, "--json")
    assert outcome.json["models"][0]["samples"] == 597
    assert "forward!" in outcome.err


def test_data_that_do_not_fit_are_refused(cli: Cli, tmp_path: Path) -> None:
    [file] = digits.save_clients(tmp_path, 1)
    x, y = digits.images()
    cases: dict[str, tuple[dict[str, object], int, list[str]]] = {
        "keys": ({"a": x}, 1, ["expected 'x' and 'y' or 'x_test' and 'y_test', found 'a'"]),
        "bytes": ({"x": x.astype(np.uint8), "y": y}, 1, ["(uint8)", "--normalize MEAN,STD"]),
        "high": ({"x": x, "y": y + 5}, 1, ["but the model has 10 outputs", "from 0 to 9"]),
        "shape": ({"x": x[:, :, :4], "y": y}, 1, ["the model fails on samples of shape"]),
        "count": ({"x": x[:5], "y": y}, 1, ["expected one target per sample"]),
        "soft": ({"x": x, "y": y.astype(np.float32)}, 1, ["expected class numbers"]),
        "objects": ({"x": np.array([{}]), "y": y[:1]}, 4, ["refused, it holds Python objects"]),
    }
    for name, (columns, code, says) in cases.items():
        np.savez(tmp_path / f"{name}.npz", **columns)  # type: ignore[arg-type]
        data = tmp_path / f"{name}.npz"
        cli.refused("eval", file, *MODEL, "--data", data, code=code, says=[f"{name}.npz", *says])


def test_wrong_commands_are_refused(cli: Cli, tmp_path: Path) -> None:
    [file] = digits.save_clients(tmp_path, 1)
    data = ("--data", digits.save_test(tmp_path))
    other = digits.save(dict(nn.Linear(3, 2).state_dict()), tmp_path / "other.pt")
    refused = cli.refused
    refused("eval", file, *MODEL, code=2, says=["--data"])
    refused("eval", file, *data, code=2, says=["--model"])
    refused("eval", file, *MODEL, *data, "--task", "guess", code=2, says=["--task is 'guess'"])
    refused("eval", file, *MODEL, *data, "--batch-size", 0, code=2, says=["--batch-size is 0"])
    refused("eval", file, *MODEL, *data, "--normalize", "1", code=2, says=["expected MEAN,STD"])
    refused("eval", other, *MODEL, *data, code=3, says=["other: ", "compared with the model"])
    outcome = refused("eval", "no.pt", *MODEL, *data, "--json", code=1, says=["no such file"])
    assert outcome.json["error"]["exit_code"] == 1


@pytest.mark.slow
def test_a_models_file_and_data_file_suffice_as_a_process(tmp_path: Path) -> None:
    [file] = digits.save_clients(tmp_path, 1)
    data = digits.save_test(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef build(hidden):\n"
        "    first, last = nn.Linear(64, hidden), nn.Linear(hidden, 10)\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)\n",
        encoding="utf-8",
    )
    model = ("--model", "net.py:build", "--model-arg", "hidden=3")  # the file has 16
    outcome = process(
        *("eval", file.name, *model, "--data", data.name, "--threads", 1), cwd=tmp_path
    )
    loss, accuracy = digits.quality(digits.logits(digits.client(1)))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[2].split()[:3] == [
        *("c1", f"{loss:.4f}", f"{100 * accuracy:.1f}"),
    ]
