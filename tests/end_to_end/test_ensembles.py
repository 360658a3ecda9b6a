"""`--method ensemble`: as a program at the clients' cost, as a state dict with what that costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.helpers import Cli
from tests.end_to_end.retraining import Scene, make_scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def test_a_program_is_written_checked_inspected_and_measured(scene: Scene, cli: Cli) -> None:
    program = scene.folder / "e.pt2"
    shown = cli.done(
        *("match", *scene.clients, "--method", "ensemble", "--model", scene.model, "-o", program)
    ).out
    assert "3 clients (a, b, c) of Sequential, as branches of one program" in shown
    assert "(growth 3.00; the 3 clients together: 249)" in shown
    assert f'torch.export.load("{program}").module()' in shown
    assert "it is the clients' ensemble itself" in shown
    checked = cli.done("verify", program, *scene.clients, "--model", scene.model).out
    assert "e.pt2: 18 tensors agree with the record" in checked
    assert "compared with its 3 clients: equal" in checked
    assert "its outputs are the mean of the clients'" in checked
    assert "an ensemble's program: 3 members" in cli.done("inspect", program).out
    (told,) = cli.done("inspect", program, "--json").json["files"]
    assert told["members"] == 3
    options = ("--model", scene.model, "--data", scene.data, "--device", "cpu", "--json")
    rows = cli.done("compare", *scene.clients, "--global", program, *options).json["rows"]
    ensemble, found = ([r for r in rows if r["kind"] == kind] for kind in ("ensemble", "global"))
    assert found[0]["loss"] == pytest.approx(ensemble[0]["loss"], abs=1e-6)
    assert found[0]["parameters"] == ensemble[0]["parameters"] == 249


def test_a_state_dict_says_what_it_costs_and_how_to_pay_less(scene: Scene, cli: Cli) -> None:
    dense = scene.folder / "e.pt"
    match = ("match", *scene.clients, "--method", "ensemble", "-o", dense)
    merged = cli.done(*match).out
    assert "side by side in one net: 1.7 × the parameters" in merged
    assert "-o FILE.pt2 --model M" in merged
    plain = cli.done("match", *scene.clients, "-o", scene.folder / "g.pt").out
    assert "side by side in one net" not in plain


def test_files_alone_make_no_program_and_say_how_to(scene: Scene, cli: Cli) -> None:
    output = scene.folder / "e.pt2"
    refused = cli("match", *scene.clients, "--method", "ensemble", "-o", output)
    assert refused.code == 2
    assert "files alone can't be run" in refused.err
    assert "--model" in refused.err
    assert not output.exists()
