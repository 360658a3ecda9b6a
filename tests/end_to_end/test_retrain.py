"""`fedmerge retrain` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedmerge
from tests.end_to_end.helpers import Cli, listing, load, record_of
from tests.end_to_end.retraining import Scene, make_scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def test_a_run_from_checkpoints_writes_a_model_and_says_what_happened(
    scene: Scene, cli: Cli
) -> None:
    done = cli.done(*scene.command("g.pt", "--data", scene.data))
    lines = done.out.splitlines()
    assert lines[0] == "fedma with 3 clients (a, b, c)"
    assert [line.split()[:2] for line in lines[2:4]] == [["1", "0"], ["2", "2"]]
    assert lines[4].split()[:3] == ["3", "last", "layer"]
    assert done.last_line == f"fedmerge verify {scene.folder / 'g.pt'}"
    assert "round 3/3 (last layer): local loss" in done.err
    assert cli.done("verify", scene.folder / "g.pt").code == 0
    build = fedmerge.ModelCode(scene.model).build
    model = fedmerge.load_model(build, scene.folder / "g.pt")
    assert model(torch.zeros(2, 4)).shape == (2, 3)


def test_the_record_has_the_rounds_and_the_shards(scene: Scene, cli: Cli) -> None:
    done = cli.done(*scene.command("g.safetensors", "--data", scene.data, "--json"))
    record = record_of(scene.folder / "g.safetensors")
    retrained = record["retrain"]
    assert retrained["options"]["method"] == "fedma"
    assert retrained["options"]["epochs"] == 1
    assert [shard["client"] for shard in retrained["shards"]] == ["a", "b", "c"]
    assert ".npz" not in json.dumps(retrained)
    assert [sum(shard["class_counts"]) for shard in retrained["shards"]] == [30, 30, 30]
    assert [entry["layer"] for entry in retrained["rounds"]] == ["0", "2", "last layer"]
    assert set(retrained["rounds"][-1]["metrics"]) == {"loss", "accuracy"}
    assert retrained["rounds"][0]["metrics"] is None
    assert "seconds" not in retrained["rounds"][0]
    assert str(scene.folder) not in json.dumps(record)
    result = done.json
    assert result["bytes_up"] == sum(entry["bytes_up"] for entry in retrained["rounds"])
    assert result["missing"] == {}
    assert result["rounds"][0]["seconds"] >= 0
    assert record["options"]["refine"] == 3


def test_the_whole_experiment_is_one_command(scene: Scene, cli: Cli) -> None:
    command = scene.command(
        "g.pt", "--passes", 2, "--set", "init_epochs=3", "--data", scene.data, "--json", clients=[]
    )
    rounds = cli.done(*command).json["rounds"]
    assert [entry["epochs"] for entry in rounds] == [3, 1, 3, 1, 1, 3]
    assert [entry["pass_number"] for entry in rounds] == [1, 1, 1, 2, 2, 2]
    evaluated = [entry["metrics"] is not None for entry in rounds]
    assert evaluated == [False, False, True, False, False, True]


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_the_baselines_run_over_the_same_shards(method: str, scene: Scene, cli: Cli) -> None:
    command = scene.command(
        "g.pt", "--method", method, "--rounds", 3, "--data", scene.data, "--json"
    )
    result = cli.done(*command).json
    assert [entry["layer"] for entry in result["rounds"]] == ["all layers"] * 3
    assert all(0 <= entry["metrics"]["accuracy"] <= 1 for entry in result["rounds"])
    assert result["growth"] == 1
    cli.done("verify", scene.folder / "g.pt")


def test_a_merged_file_goes_on_from_its_own_units(scene: Scene, cli: Cli) -> None:
    merged = scene.folder / "merged.pt"
    cli.done("match", *scene.clients, "--model", scene.model, "-o", merged)
    for source, output in ((merged, "next.pt"), (scene.folder / "next.pt", "after.pt")):
        command = scene.command(output, "--learning-rate", 1e-30, clients=[source])
        cli.done(*command, "--max-growth", "none")
        record = record_of(scene.folder / output)
        assert [entry["name"] for entry in record["sources"]] == ["a", "b", "c"]
        assert record["retrain"]["rounds"][0]["epochs"] == 1
        assert len(record["retrain"]["continued_from"]) == 64
        assert [group["client_widths"] for group in record["groups"]] == [[6] * 3, [5] * 3]


def test_averages_go_on_from_what_match_makes_of_checkpoints(scene: Scene, cli: Cli) -> None:
    words = ("--method", "fedavg", "--rounds", 2, "--set", "init=matched", "--json")
    for probes in ((), ("--set", f"probe_data={scene.data}")):
        command = scene.command(f"{len(probes)}.pt", "--data", scene.data, *words, *probes)
        result = cli.done(*command).json
        assert [entry["epochs"] for entry in result["rounds"]] == [0, 1]
        record = record_of(scene.folder / f"{len(probes)}.pt")
        assert record["retrain"]["options"]["init"] == "matched"
        assert record["probes"]["data"] == (scene.data.name if probes else None)
        cli.done("verify", scene.folder / f"{len(probes)}.pt")
    cli.done(*command, "--resume")
    other = (*command[:-1], f"probe_data={scene.folder / 'shards' / 'a.npz'}", "--resume")
    says = ["holds another run: the inputs of --set init=matched are others"]
    cli.refused(*other, code=2, says=says)


LOGGER = """
import json
class Log:
    def __init__(self):
        self.file = open("log.jsonl", "w")
    def log(self, event):
        self.file.write(json.dumps([event["event"], event.get("loss")]) + "\\n")
    def close(self):
        self.file.write("[\\"closed\\", null]\\n")
        self.file.close()
class Broken(Log):
    def log(self, event):
        raise RuntimeError("no server")
"""


def test_a_logger_hears_of_everything_and_is_closed(
    scene: Scene, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scene.folder)
    (scene.folder / "log.py").write_text(LOGGER)
    done = cli.done(*scene.command("g.pt", "--set", "logger=log.py:Log", "--json")).json
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [name for name, _ in lines if name in ("run-started", "round-done", "closed")] == [
        "run-started", *["round-done"] * 3, "closed",
    ]  # fmt: skip
    losses = [loss for name, loss in lines if name == "round-done"]
    means = [e["losses"] and sum(e["losses"].values()) / 3 for e in done["rounds"]]
    assert losses[1:] == pytest.approx(means[1:])
    broken = cli(*scene.command("h.pt", "--set", "logger=log.py:Broken"))
    assert broken.code == 1
    assert "the logger 'log.py:Broken' fails: RuntimeError: no server" in broken.err


def test_a_trained_file_is_verified_without_computing_it_again(scene: Scene, cli: Cli) -> None:
    output = scene.folder / "g.pt"
    cli.done(*scene.command("g.pt"))
    found = cli.done("verify", output, *scene.clients)
    assert found.last_line == "not recomputed: its tensors were trained in rounds"
    assert cli.done("verify", output, *scene.clients, "--json").json["recomputed"] == 0
    torch.save({**load(scene.clients[0]), "0.bias": torch.zeros(6)}, scene.clients[0])
    changed = cli("verify", output, *scene.clients)
    assert changed.code == 1
    assert "a.pt is none of the recorded clients" in changed.err


def test_a_loss_that_is_not_finite_is_told_as_that(scene: Scene, cli: Cli) -> None:
    with np.load(scene.data) as data:
        np.savez(scene.data, x=data["x"] * np.float32("inf"), y=data["y"])
    result = cli.done(*scene.command("g.pt", "--data", scene.data, "--json")).json
    assert result["rounds"][-1]["metrics"]["loss"] is None
    shown = cli.done(*scene.command("g.pt", "--data", scene.data, "--resume")).out
    assert "not finite" in shown


def test_shards_may_come_from_a_function_or_a_glob(scene: Scene, cli: Cli) -> None:
    cli.done(*scene.command("files.pt"))
    sources = {"function.pt": scene.function, "glob.pt": str(scene.folder / "shards" / "?.npz")}
    for output, shards in sources.items():
        cli.done(*scene.command(output, shards=shards))
        found = load(scene.folder / output)
        for name, tensor in load(scene.folder / "files.pt").items():
            assert torch.equal(tensor, found[name])


def test_every_event_is_one_line_of_json(scene: Scene, cli: Cli) -> None:
    events = scene.folder / "events.jsonl"
    shown = cli.done(*scene.command("g.pt", "--events", events, "-v", clients=[]))
    assert shown.err.count(" trained on 30 samples in ") == 9
    values = [json.loads(line) for line in events.read_text().splitlines()]
    clients = ["client-started", "client-finished"] * 3
    one_round = ["round-started", *clients, "group-matched", "round-done"]
    last = [name for name in one_round if name != "group-matched"]
    assert [value["event"] for value in values] == [
        *("run-started", *one_round, *one_round, *last, "run-finished")
    ]
    done = [value for value in values if value["event"] == "round-done"]
    assert [value["round"] for value in done] == [1, 2, 3]
    assert done[-1]["seconds_left"] == 0
    assert all(value["time"] > 1e9 for value in values)


def test_a_dry_run_trains_and_writes_nothing(scene: Scene, cli: Cli) -> None:
    before = listing(scene.folder)
    command = scene.command("g.pt", "--passes", 2, "--dry-run", "--max-growth", 1)
    prediction = cli.done(*command, "--json").json
    assert prediction["rounds"] == ["0", "2", "last layer"] * 2
    assert prediction["epochs"] == 1 + 3 + 1 + 1 + 3  # the first round starts from checkpoints
    parameters = 4 * 6 + 6 + 6 * 5 + 5 + 5 * 3 + 3
    assert prediction["bytes_up"] == prediction["bytes_down"] == 2 * 3 * 4 * parameters
    assert prediction["fewest_parameters"] == prediction["most_parameters"] == parameters
    assert "rounds: 6 (0, 2, last layer, 0, 2, last layer)" in cli.done(*command).out
    after = listing(scene.folder)
    assert {n: b for n, b in after.items() if "__pycache__" not in n} == before


def test_the_end_of_a_run_is_written_again_by_resume(scene: Scene, cli: Cli) -> None:
    command = scene.command("g.pt", "--data", scene.data)
    cli.done(*command)
    before = listing(scene.folder)
    cli.refused(*command, code=2, says=["g.pt: exists already"])
    (scene.folder / "g.pt").unlink()
    (scene.folder / "g.pt.json").unlink()
    cli.refused(*command, code=2, says=["g.pt.work: is not empty", "--resume"])
    cli.done(*command, "--resume")
    cli.done(*command, "--resume")  # its own output is no overwrite
    after = listing(scene.folder)
    assert {n: b for n, b in after.items() if "work" not in n} == {
        n: b for n, b in before.items() if "work" not in n
    }
    other = scene.command("g.pt", "--data", scene.data, "--set", "momentum=0.5", "--resume")
    cli.refused(*other, code=2, says=["g.pt.work: holds another run: momentum is 0.5, was 0.9"])


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (
            ("--method", "average"),
            2,
            "--method is 'average', expected fedma, fedavg, fedprox or afl",
        ),
        (("--passes", "0"), 2, "--passes is 0, expected a whole number from 1"),
        (("--learning-rate", "-1"), 2, "--learning-rate is -1.0, expected a positive number"),
        (
            ("--set", "client_timeout=0"),
            2,
            "--set client_timeout is 0.0, expected a positive number",
        ),
        (("--engine", "mpi"), 2, "--engine is 'mpi', expected local, processes or ray"),
        (("--task", "regression"), 2, "--task is 'regression'"),
        (("--normalize", "1"), 2, "--normalize is '1', expected MEAN,STD"),
        (("--device", "cuda:7"), 2, "--device cuda:7 is not there"),
        (("--events", "/no/such/folder/e.jsonl"), 2, "--events /no/such/folder/e.jsonl"),
        (("--shards", "/no/such/folder"), 2, "there is no such file or folder"),
    ],
)
def test_a_wrong_command_line_is_refused_before_any_work(
    more: tuple[str, ...], code: int, says: str, scene: Scene, cli: Cli
) -> None:
    cli.refused(*scene.command("g.pt", *more), code=code, says=[says])
    assert not (scene.folder / "g.pt").exists()


def test_inputs_that_do_not_fit_are_refused(scene: Scene, cli: Cli) -> None:
    cli.refused(
        *scene.command("g.pt", clients=scene.clients[:2]),
        code=2,
        says=["there are 2 clients but 3 shards"],
    )
    cli.refused(
        *scene.command("g.pt", clients=scene.clients[:1]), code=2, says=["one client alone"]
    )
    cli.refused(*scene.command("a.pt", "--force"), code=2, says=["the output is also an input"])
    cli.refused(
        *scene.command("g.pt", "--data", scene.folder / "none.npz"),
        code=1,
        says=["none.npz: no such file"],
    )
    np.savez(scene.folder / "shards" / "b.npz", x=np.zeros((3, 4), np.uint8), y=np.zeros(3, int))
    cli.refused(*scene.command("g.pt"), code=1, says=["b.npz", "uint8", "--normalize"])


def test_an_exported_model_cannot_be_trained(scene: Scene, cli: Cli) -> None:
    build = fedmerge.ModelCode(scene.model).build
    exported = torch.export.export(build(), (torch.zeros(2, 4),))
    torch.export.save(exported, scene.folder / "net.pt2")
    command = scene.command("g.pt")
    command[command.index(scene.model)] = str(scene.folder / "net.pt2")
    cli.refused(*command, code=2, says=["an exported model, which can't be trained"])


def test_a_configuration_gives_the_options(scene: Scene, cli: Cli) -> None:
    config = scene.folder / "run.yaml"
    config.write_text("passes: 2\nlast-epochs-factor: 1\nmax-growth: 1\n")
    rounds = cli.done(*scene.command("g.pt", "--config", config, "--json")).json["rounds"]
    assert [entry["epochs"] for entry in rounds] == [0, 1, 1, 1, 1, 1]


def test_a_record_replays_its_run(scene: Scene, cli: Cli) -> None:
    more = ("--learning-rate", 0.02, "--max-growth", 1.2, "--set", "last_rate_factor=0.5")
    cli.done(*scene.command("g.pt", *more))
    words = ("--shards", scene.folder / "shards", "--model", scene.model, "--device", "cpu")
    again = scene.folder / "again.pt"
    cli.done("retrain", *words, "--config", scene.folder / "g.pt.json", "-o", again)
    assert again.read_bytes() == (scene.folder / "g.pt").read_bytes()
    other = scene.folder / "other.pt"
    changed = ("--config", scene.folder / "g.pt.json", "--epochs", 2, "-o", other)
    cli.done("retrain", *words, *changed)
    assert other.read_bytes() != again.read_bytes()


def test_a_lightning_output_needs_a_lightning_client_before_anything_is_trained(
    scene: Scene, cli: Cli
) -> None:
    says = ["a is no Lightning checkpoint"]
    outcome = cli.refused(*scene.command("g.ckpt"), code=2, says=says)
    assert "round 1" not in outcome.err
    first = load(scene.clients[0])
    entries = {"pytorch-lightning_version": "2.5.0", "hyper_parameters": {"hidden": 6}}
    torch.save({"state_dict": first, **entries}, scene.clients[0])
    cli.done(*scene.command("g.ckpt"))
    written = torch.load(scene.folder / "g.ckpt", weights_only=True)
    assert written["hyper_parameters"] == {"hidden": 6}
    assert set(written["state_dict"]) == set(first)


@pytest.mark.parametrize("method", ["fedma", "fedavg"])
def test_what_is_written_is_what_was_trained(method: str, scene: Scene, cli: Cli) -> None:
    """Units of averaged rounds stay at their places, and yet no tensor is the clients' mean."""
    cli.done(*scene.command("g.pt", "--method", method))
    assert [group["name"] for group in record_of(scene.folder / "g.pt")["groups"]] == ["0", "2"]
    trained, states = load(scene.folder / "g.pt"), [load(path) for path in scene.clients]
    for name, value in trained.items():
        mean = torch.stack([state[name] for state in states]).mean(0)
        assert value.shape != mean.shape or not torch.allclose(value, mean, rtol=0, atol=1e-3)
