"""Runs as real processes: killed, stopped, and with clients that hang, die or come back."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import PATIENCE, Cli, record_of
from tests.end_to_end.retraining import Scene, make_scene

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="no such signals there"),
]

PASSES = ("--passes", 2)  # six rounds
LIMIT = 20  # seconds for a client; the first training in a process imports for some of them


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedmerge", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rounds_done(events: Path) -> int:
    """Return how many rounds an events file says are done."""
    text = events.read_text() if events.exists() else ""
    return sum('"round-done"' in line for line in text.splitlines())


def wait_for(running: subprocess.Popen[str], events: Path, rounds: int) -> None:
    """Wait until a run has done so many rounds; it must still be running then."""
    until = time.monotonic() + PATIENCE
    while rounds_done(events) < rounds and time.monotonic() < until:
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)
    assert rounds_done(events) >= rounds


def slow(scene: Scene, is_slow: bool) -> None:
    """Let every client sleep before it trains, so that a round takes some tenths of a second."""
    for client in "abc":
        scene.trouble(client, *(["nap"] * 30 if is_slow else []))


def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(scene: Scene, cli: Cli) -> None:
    cli.done(*scene.command("whole.pt", *PASSES, shards=scene.function))
    whole = [(scene.folder / f"whole.pt{end}").read_bytes() for end in ("", ".json")]
    moments = random.Random(7)
    for number, rounds in enumerate((0, 1, 3)):
        output, events = f"killed-{number}.pt", scene.folder / f"events-{number}.jsonl"
        command = scene.command(output, *PASSES, "--events", events, shards=scene.function)
        slow(scene, True)
        running = start(command)
        wait_for(running, events, rounds)
        time.sleep(moments.uniform(0, 0.3))
        running.kill()
        assert running.wait(PATIENCE) == -signal.SIGKILL
        running.communicate()
        assert not (scene.folder / output).exists()
        slow(scene, False)
        cli.done(*command, "--resume")
        found = [(scene.folder / f"{output}{end}").read_bytes() for end in ("", ".json")]
        assert found == whole
        values = [json.loads(line) for line in events.read_text().splitlines()]
        resumed = [value["resumed"] for value in values if value["event"] == "run-started"]
        assert resumed[-1] >= rounds


@pytest.mark.parametrize(
    ("number", "engine"), [(signal.SIGINT, "processes"), (signal.SIGTERM, "local")]
)
def test_a_signal_stops_a_run_that_can_be_resumed(
    number: signal.Signals, engine: str, scene: Scene, cli: Cli
) -> None:
    events = scene.folder / "events.jsonl"
    more = (*PASSES, "--events", events)
    command = scene.command("g.pt", *more, *engine_options(engine), shards=scene.function)
    slow(scene, True)
    running = start(command)
    wait_for(running, events, 2)
    running.send_signal(number)
    out, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130
    assert out == ""
    last = err.splitlines()[-1]
    assert last == "stopped; the same command with --resume goes on after the last full round"
    slow(scene, False)
    local = scene.command("g.pt", *more, shards=scene.function)  # the engine changes no result
    done = cli.done(*local, "--resume")
    assert "resumed after round " in done.err
    cli.done(*scene.command("whole.pt", *PASSES, shards=scene.function))
    assert (scene.folder / "g.pt").read_bytes() == (scene.folder / "whole.pt").read_bytes()


def engine_options(engine: str) -> tuple[object, ...]:
    """Return an engine, with two processes if it has any."""
    return ("--engine", engine, *(("--workers", 2) if engine == "processes" else ()))


def trouble_command(scene: Scene, engine: str, *more: object) -> list[str]:
    """Return a run whose shards come from a function that may do anything."""
    words = (*engine_options(engine), *more)
    return scene.command("g.pt", *words, shards=scene.function)


def test_clients_that_die_hang_or_fail_are_left_out_and_come_back(scene: Scene, cli: Cli) -> None:
    # Every client is tried once before the first round.
    scene.trouble("a", "", "fail", "")
    scene.trouble("b", "", "die", "")
    scene.trouble("c", "", "", "hang", "")
    events = scene.folder / "events.jsonl"
    more = ("--retries", 0, "--set", f"client_timeout={LIMIT}", "--passes", 2, "--events", events)
    outcome = cli(*trouble_command(scene, "processes", *more))
    assert outcome.code == 5, outcome.err
    record = record_of(scene.folder / "g.pt")
    missing = [entry["missing"] for entry in record["retrain"]["rounds"]]
    assert missing == [{}, {"a": "app", "b": "lost"}, {"c": "timeout"}, {}, {}, {}]
    why = "a (its data or its training failed), b (its worker was lost)"
    assert f"round 2 was done without {why}" in outcome.out
    assert "b is left out (lost): its process was ended by SIGKILL" in outcome.err
    failed = [
        json.loads(line) for line in events.read_text().splitlines() if "client-failed" in line
    ]
    assert sorted(value["message"] for value in failed)[2].startswith("net.py") or failed
    cli.done("verify", scene.folder / "g.pt")


def test_processes_and_second_tries_give_the_bytes_of_a_run_in_process(
    scene: Scene, cli: Cli
) -> None:
    cli.done(*trouble_command(scene, "local"))
    smooth = [(scene.folder / f"g.pt{end}").read_bytes() for end in ("", ".json")]
    scene.trouble("b", "", "die", "", "")
    other = ("--force", "--work-dir", scene.folder / "other", "--retries", 1)
    outcome = cli.done(*trouble_command(scene, "processes", *other))
    assert "b is tried again (lost)" in outcome.err
    assert [(scene.folder / f"g.pt{end}").read_bytes() for end in ("", ".json")] == smooth
    another = ("--force", "--work-dir", scene.folder / "another", "--seed", 1)
    cli.done(*trouble_command(scene, "local", *another))
    assert (scene.folder / "g.pt").read_bytes() != smooth[0]


def test_too_few_clients_end_a_run_that_can_be_resumed(scene: Scene, cli: Cli) -> None:
    scene.trouble("b", "", "fail", "", "")
    command = trouble_command(scene, "local", "--retries", 0, "--set", "min_clients=3")
    refused = cli(*command)
    assert refused.code == 1
    assert "2 of 3 clients delivered, 3 are needed; b (app)" in refused.err
    assert "no data today" in refused.err
    assert not (scene.folder / "g.pt").exists()
    scene.trouble("b")
    assert "resumed after round 1 of 3" in cli.done(*command, "--resume").err


CHANGING = """

class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x):
        if self.training and os.environ.get("FEDMERGE_TEST_CLIENT") == "b":
            self.register_buffer("extra", x[0].clone())
        return self.net(x)


def load_and_tell(client):
    os.environ["FEDMERGE_TEST_CLIENT"] = client
    return load(client)
"""


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_a_client_whose_model_is_another_one_after_training_is_left_out(
    engine: str, scene: Scene, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMERGE_TEST_CLIENT", "")
    net = scene.folder / "net.py"
    net.write_text(net.read_text() + CHANGING)
    for path in scene.clients:
        state = torch.load(path, weights_only=True)
        torch.save({f"net.{name}": tensor for name, tensor in state.items()}, path)
    command = scene.command("g.pt", *engine_options(engine), shards=f"{net}:load_and_tell")
    outcome = cli(*command, "--model", f"{net}:Changing", "--retries", 1)
    assert outcome.code == 5, outcome.err
    missing = [entry["missing"] for entry in record_of(scene.folder / "g.pt")["retrain"]["rounds"]]
    assert missing == [{}, {"b": "app"}, {"b": "app"}]
    assert "b is tried again (app): returned 'extra', which its model does not have" in outcome.err


def test_of_two_commands_in_one_work_dir_the_second_is_refused(scene: Scene, cli: Cli) -> None:
    events = scene.folder / "events.jsonl"
    command = scene.command("g.pt", shards=scene.function)
    slow(scene, True)
    running = start([*command, "--events", str(events)])
    wait_for(running, events, 1)
    says = ["g.pt.work: another run is using it"]
    cli.refused(*command, code=2, says=says)
    cli.refused(*command, "--resume", code=2, says=says)
    out, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, err
    assert "fedmerge verify" in out
    slow(scene, False)
    whole = (scene.folder / "g.pt").read_bytes()
    cli.done(*command, "--resume")
    assert (scene.folder / "g.pt").read_bytes() == whole
    assert not (scene.folder / "g.pt.work" / "run.lock").exists()


def test_outputs_that_came_meanwhile_are_not_overwritten(scene: Scene, cli: Cli) -> None:
    events = scene.folder / "events.jsonl"
    command = scene.command("g.pt", shards=scene.function)
    slow(scene, True)
    running = start([*command, "--events", str(events)])
    wait_for(running, events, 1)
    (scene.folder / "g.pt").write_text("another run's")
    out, err = running.communicate(timeout=PATIENCE)
    assert (running.returncode, out) == (2, "")
    assert "g.pt: exists already" in err
    assert not (scene.folder / "g.pt.json").exists()
    slow(scene, False)
    again = cli(*command, "--resume")
    assert again.code == 2
    assert "g.pt: exists already, it was written meanwhile" in again.err
    assert (scene.folder / "g.pt").read_text() == "another run's"
    cli.done(*command, "--resume", "--force")
    cli.done("verify", scene.folder / "g.pt")


def test_a_file_of_events_is_overwritten_with_force_only(scene: Scene, cli: Cli) -> None:
    events = scene.folder / "events.jsonl"
    events.write_text("mine")
    says = [f"--events {events}: exists already"]
    cli.refused(*scene.command("g.pt", "--events", events), code=2, says=says)
    assert events.read_text() == "mine"
    cli.done(*scene.command("g.pt", "--events", events, "--force"))
    once = len(events.read_text().splitlines())
    assert "mine" not in events.read_text()
    cli.done(*scene.command("g.pt", "--events", events, "--resume"))
    assert len(events.read_text().splitlines()) > once
