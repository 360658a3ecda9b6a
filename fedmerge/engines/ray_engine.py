"""The engine that runs client work on a Ray cluster."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from fedmerge.engines.engine import (
    START_LIMIT,
    ClientInfo,
    Outcome,
    Reply,
    Status,
    Task,
    call_work,
    import_work,
    thread_limits,
    usable_cores,
)
from fedmerge.engines.ray_cluster import LABEL, Homes, Node, Share, connect, nodes_up
from fedmerge.errors import UsageError
from fedmerge.process import listening
from fedmerge.values.work import Arrays, JsonObject, Place

PLACED = "placed"  # a process has taken the task
STARTED = "started"  # it has imported what the work needs


def do_task(
    function: str, arrays: Arrays, settings: JsonObject, place: Place, folder: str
) -> Iterator[str | Reply]:
    """Say how far a task is, and last how it ended; paths are those of a folder, if it is here."""
    with suppress(OSError):
        os.chdir(folder)
    yield PLACED
    import_work(function)
    yield STARTED
    with listening(lambda: False):  # who cancels a task kills its process
        reply = call_work(function, arrays, settings, place)
    yield reply


QUEUE_LIMIT = 3600.0  # seconds in the queue of a cluster that others keep busy
LOOK = 1.0  # seconds between looks at the clock and the nodes
_Stage: TypeAlias = Literal["queued", "placed", "started"]

_CAUSES = {
    "WorkerCrashedError": "its process died, perhaps for lack of memory; Ray's logs may say why",
    "OutOfMemoryError": "Ray ended its process, as its node ran out of memory",
    "NodeDiedError": "its node died",
    "LocalRayletDiedError": "Ray's node on this machine died",
    "ObjectLostError": "its arrays were lost with a node",
    "TaskCancelledError": "somebody else cancelled it",
}


def cause(error: Exception) -> str:
    """Say in one line what Ray says of a task that gave no reply."""
    known = [_CAUSES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CAUSES]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return known[0] if known else (lines or [type(error).__name__])[-1]


@dataclass(eq=False)
class Flight:
    """A task that was submitted, and how far it is."""

    task: Task
    stream: Any = None  # of what it says: placed, started, and its reply
    problem: str = ""  # why it could not be submitted
    stage: _Stage = "queued"
    since: float = field(default_factory=time.monotonic)  # when the stage began

    @property
    def seconds(self) -> float:
        """How long it has been at this stage."""
        return time.monotonic() - self.since

    def heard(self) -> Outcome | None:
        """Read the next that the task says, and return its outcome if that was the last."""
        import ray

        try:
            word = ray.get(next(self.stream))
        except (ray.exceptions.RayError, StopIteration) as error:
            return self.failed("lost", cause(error))
        if isinstance(word, Reply):
            # Copies: nothing must keep the originals in the object store.
            arrays = {name: np.array(array) for name, array in word.arrays.items()}
            return Outcome(self.task.id, self.task.client, **{**vars(word), "arrays": arrays})
        self.enter("placed" if word == PLACED else "started")
        return None

    def enter(self, stage: _Stage) -> None:
        """Begin a stage, also the same once more."""
        self.stage, self.since = stage, time.monotonic()

    def stopped(self, status: Status, message: str) -> Outcome:
        """End the task and return its outcome."""
        self.cancel()
        return self.failed(status, message)

    def failed(self, status: Status, message: str) -> Outcome:
        """Return the outcome of a task that gave no reply."""
        seconds = self.seconds if self.stage == "started" else 0.0
        return Outcome(self.task.id, self.task.client, status, message=message, seconds=seconds)

    def cancel(self) -> None:
        """Kill the process that does the task, or take the task out of the queue."""
        import ray

        if self.stream is not None and ray.is_initialized():  # it would start a cluster otherwise
            ray.cancel(self.stream, force=True)


class Flights:
    """The tasks in hand, which share a timeout and a cluster that can place some clients."""

    def __init__(self, timeout: float | None, placeable: Callable[[], Collection[str]]) -> None:
        self._flights: list[Flight] = []
        self._placeable = placeable
        self._looked = -math.inf  # when the nodes were last asked for
        self._limits: dict[_Stage, tuple[float | None, Status]] = {
            "queued": (QUEUE_LIMIT, "lost"),
            "placed": (START_LIMIT, "lost"),
            "started": (timeout, "timeout"),
        }

    def __len__(self) -> int:
        """Return how many are in hand."""
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        """Take another one in hand."""
        self._flights.append(flight)

    def cancel(self) -> None:
        """End them all."""
        for flight in self._flights:
            flight.cancel()

    def landed(self) -> list[Outcome]:
        """Wait a moment for something to happen, and return the outcomes of those that ended."""
        ready = self._ready()
        outcomes = []
        for flight in list(self._flights):
            outcome = flight.heard() if flight in ready else self._given_up(flight)
            if outcome is not None:
                self._flights.remove(flight)
                outcomes.append(outcome)
        self._wait_together()
        outcomes += self._displaced()
        return outcomes

    def _ready(self) -> list[Flight]:
        """Return a task that has something to say, or none after a while."""
        import ray

        if any(flight.problem for flight in self._flights):
            return []
        streams = {flight.stream: flight for flight in self._flights}
        ready, _ = ray.wait(list(streams), timeout=self._patience(), fetch_local=False)
        return [streams[stream] for stream in ready]

    def _patience(self) -> float:
        left = [
            limit - flight.seconds
            for flight in self._flights
            if (limit := self._limits[flight.stage][0]) is not None
        ]
        return max(0.0, min([LOOK, *left]))

    def _given_up(self, flight: Flight) -> Outcome | None:
        """Return the outcome of a task that never began, or that takes too long."""
        if flight.problem:
            return flight.failed("lost", flight.problem)
        limit, status = self._limits[flight.stage]
        if limit is None or flight.seconds < limit:
            return None
        return flight.stopped(status, f"did not answer within {limit:g} s and was stopped")

    def _wait_together(self) -> None:
        """Let tasks wait for those of this run without losing patience."""
        if any(flight.stage == "started" for flight in self._flights):
            for flight in self._flights:
                if flight.stage == "queued":
                    flight.enter("queued")

    def _displaced(self) -> list[Outcome]:
        """Return the outcomes of tasks that wait for a node that is gone."""
        waiting = [f for f in self._flights if f.stage == "queued"]
        if not waiting or time.monotonic() - self._looked < LOOK:
            return []
        self._looked, there = time.monotonic(), self._placeable()
        gone = [flight for flight in waiting if flight.task.client not in there]
        for flight in gone:
            self._flights.remove(flight)
        return [flight.stopped("lost", "no node that is up can take it") for flight in gone]


_PIN = 0.001  # of a label: it says where, not how many


class RayEngine:
    """Client work as tasks of Ray, one per slot: a node's CPUs or GPUs ÷ those of a client.

    A client named by the resource `client:<name>` of some node runs on such a node only, the
    others run anywhere. Ray is told to retry nothing: whoever runs the step decides that.
    """

    def __init__(
        self,
        clients: Sequence[str],
        *,
        address: str | None = None,
        share: Share | None = None,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self._clients = tuple(clients)
        self._share = share or Share(cpus=threads)
        self._device, self._threads = device, threads
        self._homes = Homes(self._share)
        self._end = connect(address, cpus=max(usable_cores(), math.ceil(self._share.cpus)))
        try:
            self._check_room()
            self._remote = self._task()
        except BaseException:
            self.close()
            raise

    def clients(self) -> Sequence[ClientInfo]:
        """Return the clients for which a node is up, in the order in which to start them."""
        homes = self._homes.find(self._clients, nodes_up())
        return [ClientInfo(name, _where(nodes)) for name, nodes in homes.items() if nodes]

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield one outcome per task as they end; at most one task per slot is in hand."""
        rest, flights = iter(tasks), Flights(timeout, self._names)

        def take_off() -> None:
            width = self._width()
            while len(flights) < width and (task := next(rest, None)):
                flights.add(self._begin(task, timeout))

        try:
            take_off()
            while flights:
                for outcome in flights.landed():
                    take_off()  # before the listener takes its time
                    yield outcome
        finally:  # whoever stopped listening wants no more results
            flights.cancel()

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        self._end()
        self._end = lambda: None

    def _check_room(self) -> None:
        nodes = nodes_up()
        if not any(map(self._share.slots, nodes)):
            raise UsageError(
                f"no node of the cluster has {self._share}, which a client is to get",
                "ask for less with `cpus_per_client` and `gpus_per_client`, or add nodes",
            )

    def _width(self) -> int:
        """Return how many tasks can run now; one is taken in any case, to be found lost."""
        return max(1, sum(map(self._share.slots, nodes_up())))

    def _names(self) -> set[str]:
        return {client.name for client in self.clients()}

    def _task(self) -> Any:
        """Return the function of all tasks: `num_gpus` here gives each its own fresh process."""
        import ray

        variables = {**thread_limits(self._threads), "PYTHONPATH": os.pathsep.join(_own_path())}
        return ray.remote(
            num_cpus=self._share.cpus,
            num_gpus=self._share.gpus,
            num_returns="streaming",
            max_retries=0,
            runtime_env={"env_vars": variables},
        )(do_task)

    def _begin(self, task: Task, timeout: float | None) -> Flight:
        """Submit a task; its arrays are in the object store until it ends."""
        import ray

        is_pinned = task.client in self._homes.labelled
        remote = self._remote.options(
            name=f"fedmerge {task.client}",
            resources={LABEL + task.client: _PIN} if is_pinned else None,
        )
        place = Place(self._device, self._threads, timeout)
        try:
            arrays = ray.put(dict(task.arrays))
            stream = remote.remote(task.function, arrays, task.settings, place, str(Path.cwd()))
        except ray.exceptions.RayError as error:  # the object store and its disk are full
            return Flight(task, problem=cause(error))
        return Flight(task, stream)


def _where(nodes: Sequence[Node]) -> str:
    addresses = list(dict.fromkeys(node.address for node in nodes))
    return f"Ray on {addresses[0]}" if len(addresses) == 1 else f"Ray on {len(addresses)} machines"


def _own_path() -> list[str]:
    """Return where the user's code is imported from, without what every Python here has."""
    folders = [Path(folder or ".").absolute() for folder in sys.path]
    installed = [Path(sys.prefix), Path(sys.base_prefix)]
    return [str(f) for f in folders if not any(f.is_relative_to(root) for root in installed)]
