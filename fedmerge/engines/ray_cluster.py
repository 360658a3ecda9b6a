"""Ray clusters: joined or started on loopback, and their nodes."""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmerge.errors import TrainingError, UsageError
from fedmerge.process import python_command

LABEL = "client:"  # a node's resource of this name and a client's keeps that client to the node
_ROUNDING = 1e-9  # ten tenths of a processor are one


@dataclass(frozen=True)
class Node:
    """A node that is up, and what it has in all."""

    id: str
    address: str
    resources: Mapping[str, float]

    def has_label(self, client: str) -> bool:
        """Whether the client's shard is said to lie here."""
        return self.resources.get(LABEL + client, 0) > 0


@dataclass(frozen=True)
class Share:
    """What one client gets of a node while it trains."""

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")

    def slots(self, node: Node) -> int:
        """Return how many clients fit on a node; they may share a GPU, none gets parts of two."""
        counts = [node.resources.get("CPU", 0) / self.cpus]
        gpus = node.resources.get("GPU", 0)
        if self.gpus >= 1:
            counts.append(gpus / self.gpus)
        elif self.gpus:
            counts.append(math.floor(gpus) * math.floor(1 / self.gpus + _ROUNDING))
        return math.floor(min(counts) + _ROUNDING)


@dataclass
class Homes:
    """Where clients belong: a client that a label was ever seen of stays with its label."""

    share: Share
    labelled: set[str] = field(default_factory=set)

    def find(self, clients: Sequence[str], nodes: Sequence[Node]) -> dict[str, tuple[Node, ...]]:
        """Return the nodes that each client can run on, none for those that have to wait.

        The order is the one in which clients are best started: those of one node do not keep
        the slots of the others empty.
        """
        self.labelled |= {name for name in clients if any(n.has_label(name) for n in nodes)}
        useful = [node for node in nodes if self.share.slots(node)]
        homes = {name: self._homes(name, useful) for name in clients}
        ranks = self._ranks(homes)
        return {name: homes[name] for name in sorted(homes, key=ranks.__getitem__)}

    def _homes(self, client: str, nodes: Iterable[Node]) -> tuple[Node, ...]:
        is_pinned = client in self.labelled
        return tuple(node for node in nodes if not is_pinned or node.has_label(client))

    def _ranks(self, homes: Mapping[str, tuple[Node, ...]]) -> dict[str, float]:
        """Return each client's turn: how many of the same nodes come before ÷ their slots."""
        before: dict[tuple[str, ...], int] = {}
        ranks = {}
        for name, nodes in homes.items():
            key = tuple(node.id for node in nodes)
            ranks[name] = before.get(key, 0) / max(1, sum(map(self.share.slots, nodes)))
            before[key] = before.get(key, 0) + 1
        return ranks


ANY = "auto"  # the cluster that RAY_ADDRESS names, or the one that runs on this machine
LOOPBACK = "127.0.0.1"
REACH_LIMIT = 5.0  # seconds for a host to answer at all
JOIN_LIMIT = 30.0  # seconds for a cluster to let us in; Ray itself tries for many minutes

# Ray prints its troubles to stdout, which belongs to the results: what it would print is skipped,
# outcomes say it all.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
# Ray takes 127.0.0.1 for a mistake, and listens everywhere, unless it must not form clusters of
# several machines, which this forbids on every system, whatever its name says.
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
# For the trial of an address: a few attempts instead of dozens.
_HURRY = {
    "RAY_NUM_REDIS_GET_RETRIES": "3",
    "RAY_gcs_rpc_server_connect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
_REFUSED = "InvalidAuthToken"
_TRIAL = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"


def check_installed() -> None:
    """Refuse an engine whose library is not there."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("`engine=ray` needs Ray", "pip install 'fedmerge[ray]'")


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT, or `auto`.

    >>> [is_address(text) for text in ("10.0.0.1:6379", "auto", "head", "ray://head:10001")]
    [True, True, False, False]
    """
    host, _, port = text.rpartition(":")
    return text == ANY or (bool(host) and port.isdecimal() and "/" not in host)


def connect(address: str | None, *, cpus: int) -> Callable[[], None]:
    """Join the cluster at an address, or start one with so many CPUs; return what ends it.

    A process that uses Ray already goes on with the cluster that it is in.
    """
    check_installed()
    if "ray" not in sys.modules:
        _set_up(is_own=address is None)
    import ray

    if ray.is_initialized():
        return lambda: None
    if address is not None:
        return _join(address)
    if os.environ.get(_LOOPBACK_ONLY) != "0":
        raise UsageError(
            "Ray was imported before, and would start a cluster that listens on all networks",
            "call ray.init() as you like before, or give the address of a cluster",
        )
    return _start(cpus)


def _set_up(*, is_own: bool) -> None:
    """Set what Ray reads once per process, when it is imported; what the user has set stands."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if is_own:
        os.environ[_LOOPBACK_ONLY] = "0"
    if is_own and "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def nodes_up() -> list[Node]:
    """Return the nodes of the cluster that are up."""
    import ray

    known = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in known
        if node["Alive"]
    ]


def _start(cpus: int) -> Callable[[], None]:
    """Start a cluster that only this machine and only this process can use."""
    folder = tempfile.mkdtemp(prefix="fedmerge-ray-")
    local = {"address": "local", "_node_ip_address": LOOPBACK, "include_dashboard": False}

    def stop() -> None:
        _leave()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        _initialise(**local, num_cpus=cpus, _temp_dir=folder)
    except BaseException as error:
        stop()
        if not isinstance(error, Exception):
            raise
        raise TrainingError(f"Ray cannot be started here: {_last_line(str(error))}") from error
    return stop


def _join(address: str) -> Callable[[], None]:
    if address != ANY:
        _reach(address)
    _try(address)
    try:
        _initialise(address=address)
    except BaseException:
        _leave()
        raise
    return _leave


def _initialise(**settings: Any) -> None:
    import ray

    with _signals_held(), _elsewhere(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # tips for whoever wrote Ray's call
        ray.init(**settings, **_QUIET)


def _leave() -> None:
    """Disconnect, which also ends all that this process started."""
    import ray

    ray.shutdown()


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Leave the current folder for a while.

    Ray lets its workers import from the folder that it was started in, before all else.
    """
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # somebody removed it
        yield
        return
    os.chdir(folder.anchor)
    try:
        yield
    finally:
        os.chdir(folder)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block; the second one is heard at once.

    Ray cannot stop what it has half started, and would handle SIGTERM itself, from now on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # nothing is heard here
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: h for n in numbers if (h := signal.getsignal(n)) not in (None, signal.SIG_IGN)}
    heard: list[int] = []

    def hold(number: int, frame: object) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    set_handler = signal.signal
    for number in before:
        set_handler(number, hold)
    signal.signal = lambda number, handler: None  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        for number, handler in before.items():
            set_handler(number, handler)
    if heard:
        signal.raise_signal(heard[0])


def _reach(address: str) -> None:
    """Refuse an address at which nobody listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_LIMIT).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, str(error)) from error


def _try(address: str) -> None:
    """Join in another process first: Ray's attempt can neither be hurried nor interrupted."""
    command = python_command(_TRIAL, address)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **_HURRY},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=JOIN_LIMIT,
        )
    except subprocess.TimeoutExpired as error:
        raise _unreachable(address, f"no answer within {JOIN_LIMIT:g} s") from error
    if done.returncode:
        is_refused = _REFUSED in done.stderr
        why = "it does not accept our token" if is_refused else _last_line(done.stderr)
        raise _unreachable(address, why)


def _unreachable(address: str, why: str) -> TrainingError:
    return TrainingError(
        f"no Ray cluster can be joined at {address}: {why}",
        "see that it runs (`ray status`), that one of its nodes is on this machine, and that "
        "RAY_AUTH_MODE and the token are the cluster's",
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
