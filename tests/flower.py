"""A grid of Flower's whose nodes are threads of this process: no server, no network."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterable, Mapping
from queue import SimpleQueue
from typing import Any

import pytest

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None,
    reason="Flower is not installed: pip install 'fedmerge[flower]'",
)


class ThreadGrid:
    """Nodes that answer messages by an app, each in a thread of its own, one after the other.

    Messages go through bytes both ways, as between machines.
    """

    def __init__(self, app: Any, nodes: Mapping[int, Mapping[str, Any]]) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as in a ServerApp
        self._app, self._replies = app, dict[str, Any]()
        self._queues: dict[int, SimpleQueue[Any]] = {}
        self._arrived = threading.Condition()
        self.asked: list[int] = []  # nodes, of every message
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
                reply = self._app(message, context)
            except Exception as error:
                failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error))
                reply = Message(failure, reply_to=message)
            if self._queues.get(node) is not queue:
                return  # it has left
            with self._arrived:
                self._replies[message.metadata.message_id] = reply
                self._arrived.notify_all()
