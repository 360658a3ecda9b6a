"""Tasks on their way through a Ray cluster, each until it has its one outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from fedmerge.engines.calls import START_LIMIT, Reply
from fedmerge.engines.ray_work import PLACED
from fedmerge.engines.values import Outcome, Status, Task

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
