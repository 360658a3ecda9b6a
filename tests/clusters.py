"""A real Ray cluster of two nodes on loopback, started and ended by its own processes."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'fedmerge[ray]'",
)
# `ray start`, but with 127.0.0.1 taken as it is: Ray would put this machine's address in its place,
# and listen everywhere.
RAY = (
    "import ray._private.services as services; from ray.scripts.scripts import main; "
    "services.get_node_ip_address = lambda address=None: '127.0.0.1'; main()"
)
STORE = 150_000_000  # bytes of each node's object store
OUTSIDE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_health_check_period_ms": "1000",  # a node that is gone is missed sooner
    "RAY_health_check_failure_threshold": "2",
}
PATIENCE = 300.0  # seconds for a node to start on a busy machine
STARTED = "Ray runtime started"


@dataclass
class Node:
    """A node and the process that keeps it."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        """Wait until it is up."""
        end = time.monotonic() + PATIENCE
        while STARTED not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    @property
    def raylet(self) -> int:
        """The process that does the node's work."""
        (found,) = [pid for pid in children(self.process.pid) if "raylet" in name_of(pid)]
        return found

    def kill(self) -> None:
        """Kill the process that does its work, as a machine that is switched off would."""
        kill(self.raylet)

    def stop(self) -> None:
        """End all its processes."""
        processes = family(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in processes:
            kill(pid)


@dataclass
class Cluster:
    """Nodes that share a secret; the first is the head."""

    folder: Path
    port: int
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What whoever joins must have in its environment."""
        token = str(self.folder / "token")
        loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # or it would look for us elsewhere
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, **loopback}

    def add(self, *, cpus: int = 1, gpus: int = 0, clients: Sequence[str] = ()) -> Node:
        """Start a node, which shards of these clients are said to lie on."""
        labels = {f"client:{name}": 1 for name in clients}
        head = ("--head", "--port", self.port, "--include-dashboard", "false")
        kind = ("--address", self.address) if self.nodes else (*head, "--temp-dir", self.folder)
        command = [
            *(sys.executable, "-c", RAY, "start", "--block", *kind),
            *("--node-ip-address", "127.0.0.1", "--num-cpus", cpus, "--num-gpus", gpus),
            *("--object-store-memory", STORE, "--resources", json.dumps(labels)),
        ]
        log = self.folder / f"node-{len(self.nodes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(word) for word in command],
                env={**os.environ, **self.environment, **OUTSIDE},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is the tests', not the node's
            )
        self.nodes.append(Node(process, log))
        self.nodes[-1].wait()
        return self.nodes[-1]


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Give a cluster without nodes, and end those that it has in the end."""
    folder = Path(tempfile.mkdtemp(prefix="ray-test-"))  # short: sockets have short names
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "token").chmod(0o600)
    made = Cluster(folder, free_port())
    try:
        yield made
    finally:
        for node in reversed(made.nodes):
            node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def parents() -> Mapping[int, int]:
    """Return every process's parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it just ended
            continue
    return found


def children(pid: int) -> list[int]:
    return [child for child, parent in parents().items() if parent == pid]


def family(pid: int) -> list[int]:
    """Return a process and all that come from it."""
    return [pid, *(grandchild for child in children(pid) for grandchild in family(child))]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
