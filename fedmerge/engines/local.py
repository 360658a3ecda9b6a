"""Run client work in this process, one task after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedmerge.engines.engine import ClientInfo, Outcome, Task, call_work, in_time
from fedmerge.values.work import Place


class LocalEngine:
    """Client work in the calling thread.

    Nothing can stop a function of one's own process: work that knows its limit (`Place.timeout`)
    ends itself, and whatever ends too late counts as a timeout. For work that may hang or crash
    there is `ProcessEngine`.
    """

    def __init__(self, clients: Sequence[str], *, device: str = "cpu", threads: int = 1) -> None:
        self._clients = tuple(clients)
        self._device = device
        self._threads = threads

    def clients(self) -> Sequence[ClientInfo]:
        """Return every client: all can be run here."""
        return [ClientInfo(name, f"this process, {self._device}") for name in self._clients]

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield one outcome per task, each run when it is asked for."""
        place = Place(self._device, self._threads, timeout)
        for task in tasks:
            reply = call_work(task.function, task.arrays, task.settings, place)
            yield Outcome(task.id, task.client, **vars(in_time(reply, timeout)))

    def close(self) -> None:
        """Do nothing: nothing was started."""
