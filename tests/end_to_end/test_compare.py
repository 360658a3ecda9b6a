"""A merge next to its clients, their average and their ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import digits
from tests.clients import permuted
from tests.end_to_end.helpers import APART, Cli, Outcome

MODEL = ("--model", digits.MODEL)


def rows_of(outcome: Outcome) -> dict[str, Any]:
    """Return the rows of a JSON result by what they are; clients and merged files by name."""
    rows = [{**row, "seconds_per_1000": None} for row in outcome.json["rows"]]  # is never the same
    return {r["model"] if r["kind"] in ("client", "global") else r["kind"]: r for r in rows}


def test_all_models_stand_in_one_table(cli: Cli, tmp_path: Path) -> None:
    digits.save_clients(tmp_path)
    data = digits.save_test(tmp_path)
    cli.done("match", tmp_path, *MODEL, "--input-shape", "2,1,8,8", "-o", tmp_path / "global.pt")
    outcome = cli.done(
        *("compare", tmp_path / "c?.pt", "--global", tmp_path / "global.pt", *MODEL),
        *("--data", data),
    )
    title, columns, *rows, pull, gain, cost = outcome.out.splitlines()
    assert title == f"classification on {data}, 597 samples"
    assert pull.startswith("pull: 0 is as far from the ensemble as the nearest client")
    assert gain.startswith("gain: 0 is as good as the best client")
    assert cost.startswith("per 1,000: seconds to run 1,000 samples")
    known = ["model", "loss", "accuracy", "pull", "gain", "parameters", "growth"]
    assert columns.split() == [*known, "per", "1,000", "memory"]
    names = [row.strip().split("  ")[0] for row in rows]
    assert names[:4] == ["c1", "c2", "c3", "mean of the clients"]
    assert names[4].startswith("best client (c")
    assert names[5:] == ["element-wise average", "ensemble", "one-shot match", "global"]
    mean = torch.stack([digits.logits(digits.client(k)) for k in (1, 2, 3)]).mean(0)
    loss, accuracy = digits.quality(mean)
    expected = ["ensemble", f"{loss:.4f}", f"{100 * accuracy:.1f}", "%", "1.00", "1.00"]
    expected += ["3,630", "3.00"]
    *found, seconds, unit, _, megabytes = rows[6].split()
    assert found == expected
    assert float(seconds) >= 0
    assert (unit, megabytes) == ("s", "MB")
    assert rows[7].split()[2:-4] == rows[8].split()[1:-4]


def test_json_says_which_is_best_and_what_to_be_warned_of(cli: Cli, tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    data = digits.save_test(tmp_path)
    empty = {name: torch.zeros_like(tensor) for name, tensor in digits.client(1).items()}
    bad = digits.save(empty, tmp_path / "bad.pt")
    command = ("compare", *files, "--global", bad, *MODEL, "--data", data, *APART)
    outcome = cli.done(*command, "--json")
    value, rows = outcome.json, rows_of(outcome)
    clients = {name: rows[name]["metrics"]["accuracy"] for name in ("c1", "c2", "c3")}
    best = max(clients, key=lambda name: clients[name])
    assert value["best_client"] == best
    assert value["samples"] == 597
    [warning] = value["warnings"]
    assert warning.startswith("bad is worse than the best client: ")
    assert f"warning: {warning}" in outcome.err.splitlines()
    assert rows["match"]["loss"] == pytest.approx(rows["ensemble"]["loss"], abs=1e-5)
    assert rows["bad"]["growth"] == 1.0


def test_permuted_copies_are_matched_without_loss(cli: Cli, tmp_path: Path) -> None:
    state = digits.client(1)
    states = {"own": state, "copy": permuted(state, seed=1)[0]}
    files = [digits.save(own, tmp_path / f"{name}.pt") for name, own in states.items()]
    data = digits.save_test(tmp_path)
    rows = rows_of(cli.done("compare", *files, *MODEL, "--data", data, "--json"))
    accuracy = {kind: row["metrics"]["accuracy"] for kind, row in rows.items()}
    assert accuracy["own"] == accuracy["copy"] == accuracy["match"] == accuracy["ensemble"]
    assert accuracy["average"] < accuracy["own"] - 0.03


@pytest.mark.slow
def test_options_of_the_match_change_its_row_alone(cli: Cli, tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    command = ("compare", *files, *MODEL, "--data", digits.save_test(tmp_path), "--json")
    usual = rows_of(cli.done(*command))
    narrow = rows_of(cli.done(*command, "--max-growth", 1))
    assert (narrow["match"]["growth"], usual["match"]["growth"] > 1.1) == (1.0, True)
    assert narrow["match"]["loss"] != usual["match"]["loss"]
    assert {k: r for k, r in narrow.items() if k != "match"} == {
        k: r for k, r in usual.items() if k != "match"
    }


def test_a_record_replays_its_match(cli: Cli, tmp_path: Path) -> None:
    digits.save_clients(tmp_path)
    merged = tmp_path / "global.pt"
    cli.done("match", tmp_path, "-o", merged, "--max-growth", 1.2)
    data = digits.save_test(tmp_path)
    config = ("--config", f"{merged}.json")
    rows = rows_of(
        cli.done("compare", "--global", merged, *MODEL, "--data", data, *config, "--json")
    )
    assert rows["match"]["metrics"] == rows["global"]["metrics"]
    assert rows["match"]["growth"] == rows["global"]["growth"] == pytest.approx(1.2, abs=0.1)


@pytest.mark.slow
def test_other_widths_leave_the_average_out_and_say_why(cli: Cli, tmp_path: Path) -> None:
    files = [
        digits.save(digits.client(1), tmp_path / "narrow.pt"),
        digits.save(digits.client(2, hidden=24), tmp_path / "wide.pt"),
    ]
    command = ("compare", *files, *MODEL, "--data", digits.save_test(tmp_path))
    outcome = cli.done(*command)
    assert outcome.last_line.startswith("no element-wise average: group '1' has different widths")
    average = rows_of(cli.done(*command, "--json"))["average"]
    assert (average["loss"], average["metrics"], average["parameters"]) == (None, None, None)
    assert "different widths (16, 24)" in average["reason"]


def test_wrong_commands_are_refused(cli: Cli, tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path, 2)
    data = ("--data", digits.save_test(tmp_path))
    refused = cli.refused
    refused("compare", files[0], *MODEL, *data, code=2, says=["at least 2 clients are needed"])
    refused("compare", *files, *MODEL, code=2, says=["--data"])
    refused("compare", *files, *data, code=2, says=["--model"])
    odd = ("--max-growth", 0.5)
    refused("compare", *files, *MODEL, *data, *odd, code=2, says=["--max-growth is 0.5"])
    gone = ("--global", "no.pt")
    refused("compare", *files, *MODEL, *data, *gone, code=1, says=["no.pt: no such file"])
    other = digits.save({"weight": torch.zeros(2, 2)}, tmp_path / "other.pt")
    refused("compare", *files, other, *MODEL, *data, code=3, says=["other: "])
