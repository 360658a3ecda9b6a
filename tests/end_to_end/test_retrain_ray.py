"""Runs over Ray as real processes: the same bytes as in-process, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.clusters import Cluster, cluster, family, free_port, kill, name_of, needs_ray
from tests.end_to_end.helpers import PATIENCE, Cli, record_of
from tests.end_to_end.retraining import Scene, make_scene
from tests.end_to_end.test_retrain_processes import PASSES, slow, wait_for
from tests.unit.engines.test_processes import wait_until_dead

pytestmark = [
    pytest.mark.slow,
    needs_ray,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
]
OWN = ("--engine", "ray")
LIMIT = 12  # seconds for a client
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
LISTENING = "0A"
HELPERS = ("ray::Dash", "ray::Runt")  # agents


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with cluster() as made:
        made.add()
        made.add(clients=["b"])
        yield made


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


@pytest.fixture
def short() -> Iterator[Path]:
    """An empty folder with a name that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ray-test-"))
    yield folder
    shutil.rmtree(folder)


def start(command: list[str], more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedmerge", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(more or {})},
        text=True,
        start_new_session=True,
    )


def run(command: list[str], more: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    running = start(command, more)
    out, err = running.communicate(timeout=PATIENCE)
    return running.returncode, out, err


def written(scene: Scene, name: str) -> list[bytes]:
    return [(scene.folder / f"{name}{end}").read_bytes() for end in ("", ".json")]


def join(nodes: Cluster) -> tuple[str, ...]:
    return (*OWN, "--address", nodes.address)


def names(processes: Iterable[int]) -> dict[int, str]:
    """Return the names of processes, but for those that have ended."""
    found = {}
    for pid in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = name_of(pid)
    return found


def listening(pid: int) -> list[str]:
    """Return the addresses, in hexadecimal, at which a process listens; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return addresses_of(pid)
    return []


def addresses_of(pid: int) -> list[str]:
    """Return them of a process that is there."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(str(entry.readlink()))
        except FileNotFoundError:  # just closed
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        words[1].partition(":")[0]
        for words in lines
        if words[3] == LISTENING and f"socket:[{words[9]}]" in sockets
    ]


def test_a_run_can_change_engines_and_leaves_nothing_running(
    scene: Scene, cli: Cli, two_nodes: Cluster
) -> None:
    cli.done(*scene.command("whole.pt", *PASSES, shards=scene.function))
    events = scene.folder / "events.jsonl"

    def command(*engine: str) -> list[str]:
        more = (*PASSES, "--events", events, "--resume", *engine)
        return scene.command("g.pt", *more, shards=scene.function)

    slow(scene, True)
    running = start(command())  # local
    wait_for(running, events, 1)
    running.send_signal(signal.SIGTERM)
    assert running.communicate(timeout=PATIENCE)[0] == ""
    assert running.returncode != 0

    running = start(command(*OWN))
    wait_for(running, events, 3)
    processes = family(running.pid)
    addresses = [address for pid in processes for address in listening(pid)]
    assert len(addresses) >= 3  # of the head, of the node
    assert set(addresses) <= set(LOOPBACK)
    os.killpg(running.pid, signal.SIGINT)  # Ctrl-C reaches all that the terminal started
    out, err = running.communicate(timeout=PATIENCE)
    assert running.returncode != 0
    assert out == ""
    assert err.splitlines()[-1].startswith("stopped; the same command with --resume")
    assert all(map(wait_until_dead, processes))

    slow(scene, False)
    code, out, err = run(command(*join(two_nodes)), two_nodes.environment)
    assert (code, "resumed after round " in err) == (0, True), err
    assert "wrote " in out
    assert written(scene, "g.pt") == written(scene, "whole.pt")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_while_ray_starts_leaves_nothing(
    scene: Scene, short: Path, number: signal.Signals
) -> None:
    running = start(scene.command("g.pt", *OWN), {"TMPDIR": str(short)})
    processes: dict[int, str] = {}
    is_told = False
    while running.poll() is None:
        processes |= names(family(running.pid))
        if not is_told and "raylet" in processes.values():
            assert list(short.iterdir())
            running.send_signal(number)
            is_told = True
        time.sleep(0.05)
    out, err = running.communicate()
    assert (running.returncode, out) == (130, "")
    assert err.splitlines()[-1].startswith("stopped; the same command with --resume")
    assert any(name.startswith(HELPERS) for name in processes.values())
    assert all(map(wait_until_dead, processes))
    assert list(short.iterdir()) == []


def test_no_node_and_no_training_outlives_a_killed_command(scene: Scene, short: Path) -> None:
    events = scene.folder / "events.jsonl"
    slow(scene, True)
    command = scene.command("g.pt", "--events", events, *OWN, shards=scene.function)
    running = start(command, {"TMPDIR": str(short)})
    wait_for(running, events, 1)
    processes = family(running.pid)
    helpers = [pid for pid in processes if name_of(pid).startswith(HELPERS)]
    workers = [pid for pid in processes if name_of(pid).startswith("ray::") and pid not in helpers]
    nodes = [pid for pid, name in names(processes).items() if name in ("raylet", "gcs_server")]
    assert workers
    assert len(nodes) == 2
    running.kill()
    running.communicate()
    assert all(map(wait_until_dead, [*workers, *nodes]))
    for pid in processes:
        kill(pid)  # Ray's helpers would follow within minutes


def test_clients_that_die_hang_or_fail_are_left_out_and_come_back(
    scene: Scene, two_nodes: Cluster
) -> None:
    # Every client is tried once before the first round.
    scene.trouble("a", "", "fail", "")
    scene.trouble("b", "", "die", "")
    scene.trouble("c", "", "", "hang", "")
    more = (
        "--retries",
        0,
        "--set",
        f"client_timeout={LIMIT}",
        "--passes",
        2,
        "--json",
        *join(two_nodes),
    )
    command = scene.command("g.pt", *more, shards=scene.function)
    code, out, err = run(command, two_nodes.environment)
    assert code == 5, err
    assert json.loads(out)["method"] == "fedma"  # and nothing else was printed there
    missing = [entry["missing"] for entry in record_of(scene.folder / "g.pt")["retrain"]["rounds"]]
    assert missing == [{}, {"a": "app", "b": "lost"}, {"c": "timeout"}, {}, {}, {}]
    assert "b is left out (lost): its process died" in err


def test_code_and_shards_are_found_from_the_folder_of_the_command(
    scene: Scene, two_nodes: Cluster, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scene.folder)
    words = "retrain a.pt b.pt c.pt --shards shards --model net:build --epochs 1 --device cpu"
    cli.done(*words.split(), "-o", "local.pt")
    command = [*words.split(), "-o", "ray.pt", *join(two_nodes), "--set", "cpus_per_client=0.5"]
    code, _, err = run(command, two_nodes.environment)
    assert code == 0, err
    assert written(scene, "ray.pt") == written(scene, "local.pt")


def refused(scene: Scene, *words: object, more: Mapping[str, str] | None = None) -> tuple[int, str]:
    code, out, err = run(scene.command("g.pt", *words), more)
    assert out == ""
    assert not (scene.folder / "g.pt").exists()
    return code, err


def test_an_address_where_nobody_listens_is_refused(scene: Scene) -> None:
    address = f"127.0.0.1:{free_port()}"
    code, err = refused(scene, *OWN, "--address", address)
    assert code == 1
    assert f"error: no Ray cluster can be joined at {address}: " in err
    assert "hint: see that it runs" in err


def test_an_address_where_something_else_listens_is_refused(scene: Scene) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code, err = refused(scene, *OWN, "--address", address)
    assert code == 1
    assert f"error: no Ray cluster can be joined at {address}: " in err


def test_a_wrong_token_is_refused(scene: Scene, two_nodes: Cluster) -> None:
    other = {"RAY_AUTH_TOKEN": "0" * 64, "RAY_AUTH_TOKEN_PATH": ""}
    more = {**two_nodes.environment, **other}
    code, err = refused(scene, *join(two_nodes), more=more)
    assert code == 1
    assert f"joined at {two_nodes.address}: it does not accept our token" in err
