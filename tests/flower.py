"""Flower in tests: a grid whose nodes are threads, and real processes on loopback."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None,
    reason="Flower is not installed: pip install 'fedmerge[flower]'",
)
PATIENCE = 900.0  # seconds for a run on a busy machine


class ThreadGrid:
    """Nodes that answer messages by an app, each in a thread of its own, one after the other.

    What trains needs torch's random numbers for itself, and so `is_shared` to be off.
    """

    def __init__(
        self, app: Any, nodes: Mapping[int, Mapping[str, Any]], *, is_shared: bool = True
    ) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as in a ServerApp
        self._app, self._replies = app, dict[str, Any]()
        self._queues: dict[int, SimpleQueue[Any]] = {}
        self._arrived = threading.Condition()
        self._turn: AbstractContextManager[Any] = nullcontext() if is_shared else threading.Lock()
        self.asked: list[int] = []  # nodes, of every message
        self._answered: list[str] = []  # messages
        for node, configuration in nodes.items():
            self.join(node, configuration)

    def join(self, node: int, configuration: Mapping[str, Any]) -> None:
        """Let a node come up."""
        self._queues[node] = SimpleQueue()
        work = threading.Thread(target=self._work, args=(node, configuration), daemon=True)
        work.start()

    def leave(self, node: int) -> None:
        """Let a node go; it answers nothing any more."""
        self._queues.pop(node).put(None)

    def wait(self) -> None:
        """Wait until every node has answered what it was asked."""
        with self._arrived:
            self._arrived.wait_for(lambda: len(self._answered) == len(self.asked))

    def get_node_ids(self) -> Iterable[int]:
        return list(self._queues)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        numbers = []
        for message in messages:
            number = f"message-{len(self.asked)}"
            node = message.metadata.dst_node_id
            self.asked.append(node)
            message.metadata.__dict__["_message_id"] = number
            if node in self._queues:
                self._queues[node].put(message)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        with self._arrived:
            return [self._replies.pop(n) for n in message_ids if n in self._replies]

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None = None
    ) -> list[Any]:
        numbers = self.push_messages(messages)
        with self._arrived:
            self._arrived.wait_for(lambda: set(numbers) <= self._replies.keys(), timeout)
        return self.pull_messages(numbers)

    def _work(self, node: int, configuration: Mapping[str, Any]) -> None:
        from flwr.app import Context, Error, Message, RecordDict
        from flwr.common.constant import ErrorCode

        context = Context(1, node, dict(configuration), RecordDict(), {})
        queue = self._queues[node]
        while (message := queue.get()) is not None:
            try:
                with self._turn:
                    reply = self._app(message, context)
            except Exception as error:
                failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error))
                reply = Message(failure, reply_to=message)
            if self._queues.get(node) is not queue:
                return  # it has left
            with self._arrived:
                self._replies[message.metadata.message_id] = reply
                self._answered.append(message.metadata.message_id)
                self._arrived.notify_all()


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass
class FlowerHome:
    """Flower's own folder and what runs with it: commands, servers and nodes, all on loopback."""

    folder: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, *arguments: str) -> str:
        """Run a command to its end and return what it said."""
        done = subprocess.run(
            [_script(arguments[0]), *arguments[1:]],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start(self, *arguments: str, log: str) -> None:
        """Start a server or a node."""
        with (self.folder / log).open("wb") as file:
            self.started.append(
                subprocess.Popen(
                    [_script(arguments[0]), *arguments[1:]],
                    env=self.environment,
                    cwd=self.folder,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )

    def wait_for(self, port: int) -> None:
        """Wait until somebody listens on a port."""
        end = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            assert time.monotonic() < end, f"nobody listens on port {port}"
            time.sleep(0.2)

    def processes(self) -> list[int]:
        """Return the processes that were started in this home, by whomever."""
        mark = f"FLWR_HOME={self.folder}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """End everything that runs in this home, and wait until it has ended."""
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            for number in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(number, signal_)
            end = time.monotonic() + 10
            while self.processes() and time.monotonic() < end:
                for process in self.started:
                    process.poll()
                time.sleep(0.1)
        for process in self.started:
            process.wait()
        assert not self.processes()


@contextmanager
def flower_home(folder: Path) -> Iterator[FlowerHome]:
    """Make a folder in which Flower's commands keep what they keep, and end what they started."""
    folder.mkdir()
    outside = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    home = FlowerHome(
        folder,
        {
            **outside,
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
    )
    try:
        yield home
    finally:
        home.stop()


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)
