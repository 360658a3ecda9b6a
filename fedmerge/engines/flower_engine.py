"""The engine that runs client work on the nodes of a Flower federation.

Flower's grid is the transport: a task is a message to its client's node, an outcome is the reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from fedmerge.decoding import decode_json
from fedmerge.engines.engine import (
    CallWork,
    ClientInfo,
    Outcome,
    Reply,
    Status,
    Task,
    call_work,
)
from fedmerge.engines.remote import (
    GRACE,
    Answer,
    Card,
    Order,
    Said,
    Site,
    answer_of,
    order_of,
    outcome_of,
    reply_of,
    unreadable,
)
from fedmerge.errors import TrainingError, UsageError
from fedmerge.values.arrays import Array
from fedmerge.values.work import Arrays

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

ACTION = "fedmerge"  # of messages: an app may answer others, too
LOOK = 0.05  # seconds between looks at replies
LOOK_AT_NODES = 2.0  # seconds between looks at who is up
NAMING_LIMIT = 300.0  # seconds for nodes to say whose they are

_ARRAYS, _SAID = "arrays", "said"
CallerOf: TypeAlias = Callable[["Context"], CallWork]  # what a node does tasks with


class FlowerEngine:
    """Client work on the nodes of a grid, one task per node at a time.

    Nodes say which client they are; one that leaves is lost, and may come back. Flower can't stop
    work that hangs: its node is given up until it answers.
    """

    def __init__(self, grid: Grid, clients: Sequence[str] = ()) -> None:
        self._grid = grid
        self._names: dict[int, str] = {}  # node → its client
        self._clients = tuple(clients) or tuple(sorted(self._homes()))

    def clients(self) -> Sequence[ClientInfo]:
        """Return the clients whose nodes are up."""
        homes = self._homes()
        return [ClientInfo(c, f"Flower's node {homes[c]}") for c in self._clients if c in homes]

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield one outcome per task as they end; at most one task per node is in hand."""
        rest, flights = iter(tasks), Flights(self._grid, timeout)
        while True:
            homes = self._homes()
            while len(flights) < max(1, len(homes)) and (task := next(rest, None)):
                flights.add(task, homes.get(task.client))
            if not flights:
                return
            yield from flights.landed()

    def close(self) -> None:
        """Do nothing: the federation is not ours."""

    def _homes(self) -> dict[str, int]:
        """Return the nodes that are up by their clients; new ones are asked for their names."""
        there = list(self._grid.get_node_ids())
        unknown = [node for node in there if node not in self._names]
        if unknown:
            self._names |= _asked_names(self._grid, unknown)
        homes: dict[str, int] = {}
        for node in there:
            if node in self._names and homes.setdefault(self._names[node], node) != node:
                raise TrainingError(
                    f"two of Flower's nodes say that they are client '{self._names[node]}'",
                    "give every node a name of its own, as `client` of its --node-config",
                )
        return homes


@dataclass
class Flight:
    """A task in hand; it has no message until its node is free."""

    task: Task
    node: int | None  # None: nobody has this client
    message: str = ""
    since: float = 0.0


class Flights:
    """The tasks in hand of one run."""

    def __init__(self, grid: Grid, timeout: float | None) -> None:
        self._grid, self._timeout = grid, timeout
        self._flights: list[Flight] = []
        self._looked = time.monotonic()  # at the nodes

    def __len__(self) -> int:
        """Return how many are in hand."""
        return len(self._flights)

    def add(self, task: Task, node: int | None) -> None:
        """Take another one in hand, and send it if its node is free."""
        self._flights.append(Flight(task, node))
        self._send()

    def landed(self) -> list[Outcome]:
        """Return the outcomes of tasks that ended, after a moment if there are none."""
        outcomes = [*self._replied(), *self._given_up()]
        self._send()
        if not outcomes:
            time.sleep(LOOK)
        return outcomes

    def _send(self) -> None:
        busy = {flight.node for flight in self._flights if flight.message}
        for flight in self._flights:
            if flight.node is not None and not flight.message and flight.node not in busy:
                message = _message_of(flight.task, flight.node, self._timeout)
                [flight.message] = self._grid.push_messages([message])
                flight.since = time.monotonic()
                busy.add(flight.node)

    def _replied(self) -> list[Outcome]:
        sent = {flight.message: flight for flight in self._flights if flight.message}
        outcomes = []
        for message in self._grid.pull_messages(list(sent)) if sent else ():
            flight = sent[message.metadata.reply_to_message_id]
            self._flights.remove(flight)
            outcomes.append(outcome_of(flight.task, _reply_of(message)))
        return outcomes

    def _given_up(self) -> list[Outcome]:
        """Return the outcomes of tasks whose node left or does not answer."""
        up = self._nodes_up()
        outcomes = []
        for flight in list(self._flights):
            late = self._timeout is not None and flight.message and self._is_late(flight)
            if late:
                limit = f"did not answer within {self._timeout:g} s"
                outcome = _failed(flight, "timeout", limit)
            elif flight.node is None or (up is not None and flight.node not in up):
                outcome = _failed(flight, "lost", "its node left Flower's federation")
            else:
                continue
            self._flights.remove(flight)
            outcomes.append(outcome)
        return outcomes

    def _is_late(self, flight: Flight) -> bool:
        assert self._timeout is not None
        return time.monotonic() - flight.since > self._timeout + GRACE

    def _nodes_up(self) -> Collection[int] | None:
        """Return the nodes that are up, None where that was asked a moment ago."""
        if time.monotonic() - self._looked < LOOK_AT_NODES:
            return None
        self._looked = time.monotonic()
        return set(self._grid.get_node_ids())


def _failed(flight: Flight, status: Status, message: str) -> Outcome:
    seconds = time.monotonic() - flight.since if flight.message else 0.0
    return Outcome(flight.task.id, flight.task.client, status, message=message, seconds=seconds)


def _message_of(task: Task, node: int, timeout: float | None) -> Message:
    from flwr.app import Message, MessageType

    return Message(
        packed(task.arrays, order_of(task, timeout)),
        dst_node_id=node,
        message_type=f"{MessageType.TRAIN}.{ACTION}",
    )


def _reply_of(message: Message) -> Reply:
    """Return what a node replied; whatever is wrong with it is that client's failure."""
    if message.has_error():
        return _reply_of_error(message)
    try:
        arrays, answer = unpacked(message.content, Answer)
    except TrainingError as error:
        return Reply("app", message=error.problem)
    return reply_of(arrays, answer)


def _reply_of_error(message: Message) -> Reply:
    """Return the reply that stands for an error of Flower's: the app's own, or a lost node's."""
    from flwr.common.constant import ErrorCode

    lines = [line.strip() for line in (message.error.reason or "").splitlines() if line.strip()]
    is_app = message.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    last = (lines or [f"Flower's error {message.error.code}"])[-1]
    return Reply("app" if is_app else "lost", message=last, details="\n".join(lines))


def _asked_names(grid: Grid, nodes: Sequence[int]) -> dict[int, str]:
    """Return the clients of those nodes that answer to fedmerge."""
    from flwr.app import Message, MessageType, RecordDict

    kind = f"{MessageType.QUERY}.{ACTION}"
    asked = [Message(RecordDict(), dst_node_id=node, message_type=kind) for node in nodes]
    names = {}
    for reply in grid.send_and_receive(asked, timeout=NAMING_LIMIT):
        if not reply.has_error():
            _, card = unpacked(reply.content, Card)
            names[reply.metadata.src_node_id] = card.client
    return names


def answer_tasks(
    app: ClientApp,
    works: Collection[str],
    *,
    caller_of: CallerOf = lambda context: call_work,
    device: str = "cpu",
    threads: int = 1,
) -> None:
    """Let an app of Flower's do the tasks of an engine, of these works and no others.

    A node says where and with what it computes; a server only says what, and for how long.
    """
    from flwr.app import Message

    @app.query(ACTION)
    def name(message: Message, context: Context) -> Message:
        return Message(packed({}, Card(client_of(context))), reply_to=message)

    @app.train(ACTION)
    def work(message: Message, context: Context) -> Message:
        arrays, order = unpacked(message.content, Order)
        site = Site(works, lambda *given: caller_of(context)(*given), device, threads)
        reply = site.reply(arrays, order)
        return Message(packed(reply.arrays, answer_of(reply)), reply_to=message)


def client_of(context: Context) -> str:
    """Return which client a node is: `client` of its configuration, or client-1, client-2, …"""
    configured = context.node_config
    if "client" in configured:
        return str(configured["client"])
    if "partition-id" in configured:
        return f"client-{int(configured['partition-id']) + 1}"
    raise UsageError(
        "the node's configuration does not say which client this is",
        "start the node with --node-config 'client=\"NAME\"' or 'partition-id=0'",
    )


def packed(arrays: Arrays, said: Order | Answer | Card) -> RecordDict:
    """Return arrays and what is said beside them as the content of a message."""
    from flwr.app import Array as SentArray
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    record = ArrayRecord({name: SentArray(np.asarray(array)) for name, array in arrays.items()})
    text = msgspec.json.encode(said).decode()
    return RecordDict({_ARRAYS: record, _SAID: ConfigRecord({"json": text})})


def unpacked(content: RecordDict, kind: type[Said]) -> tuple[dict[str, Array], Said]:
    """Return the arrays of a message's content, and what is said beside them."""
    fail = unreadable("Flower")
    try:
        text = str(content.config_records[_SAID]["json"])
        arrays = {name: array.numpy() for name, array in content.array_records[_ARRAYS].items()}
    except (KeyError, TypeError, ValueError, EOFError) as error:  # numpy's, of bytes that lie
        raise fail(f"{type(error).__name__}: {error}") from error
    return arrays, decode_json(text, kind, fail=fail)
