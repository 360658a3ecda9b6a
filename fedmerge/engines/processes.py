"""Run client work in worker processes, one task each at a time."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

from fedmerge.engines.calls import START_LIMIT, thread_limits, usable_cores
from fedmerge.engines.interpreter import python_command
from fedmerge.engines.values import ClientInfo, Outcome, Status, Task
from fedmerge.engines.wire import receive, send
from fedmerge.engines.worker import task_message
from fedmerge.types.work import Place

_FAREWELL = 5.0  # seconds for a worker to leave by itself
_WORKER = "from fedmerge.engines.worker import main; main()"
_Ended: TypeAlias = "queue.SimpleQueue[tuple[_Seat, Outcome]]"


def default_workers(devices: Sequence[str], threads: int) -> int:
    """Return one worker per accelerator, or as many as the cores can feed."""
    if tuple(devices) != ("cpu",):
        return len(devices)
    return max(1, usable_cores() // threads)


class ProcessEngine:
    """Client work in fresh Python processes, which devices are dealt to in turn.

    A task past its timeout is ended by killing its process, a process that dies is noticed at
    once; either way the next task finds a new one. No process outlives this one, even killed.
    """

    def __init__(
        self,
        clients: Sequence[str],
        *,
        workers: int,
        devices: Sequence[str] = ("cpu",),
        threads: int = 1,
    ) -> None:
        assert workers >= 1
        assert devices
        self._clients = tuple(clients)
        dealt = [devices[number % len(devices)] for number in range(workers)]
        self._seats = [_Seat(Place(device, threads)) for device in dealt]
        self._running = threading.Lock()

    def clients(self) -> Sequence[ClientInfo]:
        """Return every client: any worker can run it."""
        where = f"one of {len(self._seats)} processes"
        return [ClientInfo(name, where) for name in self._clients]

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield one outcome per task as they end; at most one task per worker is in hand.

        Where the system refuses to start a worker, the others do its tasks; if there are none,
        the task is lost.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this engine is running tasks already")
        try:
            yield from self._run(iter(tasks), timeout)
        finally:
            self._running.release()

    def _run(self, tasks: Iterator[Task], timeout: float | None) -> Iterator[Outcome]:
        ended: _Ended = queue.SimpleQueue()
        idle, busy = list(self._seats), set[_Seat]()
        waiting: list[Task] = []  # for another worker than the one that could not be started

        def fill_seats() -> None:
            while idle and (task := waiting.pop() if waiting else next(tasks, None)):
                seat = idle.pop(0)
                problem = seat.begin(task, timeout, ended)
                if problem and (idle or busy):
                    waiting.append(task)
                    continue
                busy.add(seat)
                if problem:
                    ended.put((seat, Outcome(task.id, task.client, "lost", message=problem)))

        try:
            fill_seats()
            while busy:
                seat, outcome = ended.get()
                busy.remove(seat)
                idle.append(seat)
                fill_seats()  # before the listener takes its time
                yield outcome
        finally:  # whoever stopped listening wants no more results
            for seat in busy:
                seat.clear()

    def close(self) -> None:
        """End all worker processes."""
        for seat in self._seats:
            seat.clear()


class _Seat:
    """A place for one worker, which is started when there is a task for it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._worker: _Worker | None = None

    def begin(self, task: Task, timeout: float | None, ended: _Ended) -> str:
        """Have a task done, and put its outcome into the queue; or say why it can't be started."""
        place = Place(self._place.device, self._place.threads, timeout)
        try:
            worker = self._started()
            threading.Thread(
                target=lambda: ended.put((self, worker.do(task, place))), daemon=True
            ).start()
        except (OSError, RuntimeError) as error:  # too many processes, threads or open files
            self.clear()
            return f"its process cannot be started: {error}"
        return ""

    def _started(self) -> _Worker:
        """Return the worker, a new one if there is none that can be used."""
        if self._worker is None or not self._worker.is_usable:
            self.clear()
            self._worker = _Worker(self._place.threads)
        return self._worker

    def clear(self) -> None:
        """End the worker, whatever it is doing."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            python_command(_WORKER, heeds_signals=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **thread_limits(threads)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._talking = threading.Lock()
        self._failed = False
        self._expired = False

    @property
    def is_usable(self) -> bool:
        """Whether the process can take another task."""
        return not self._failed and self._process.poll() is None

    def do(self, task: Task, place: Place) -> Outcome:
        """Send a task and wait for its reply, its death or its time limit."""
        with self._talking:
            began, limit = time.monotonic(), START_LIMIT
            status: Status = "lost"  # what passing the limit means
            try:
                with self._limit(limit):
                    send(self._to, task_message(task.function, task.settings, place), task.arrays)
                    receive(self._from)
                if place.timeout is not None:
                    began, limit, status = time.monotonic(), place.timeout, "timeout"
                with self._limit(place.timeout):
                    reply, arrays = receive(self._from)
                return Outcome(task.id, task.client, arrays=arrays, **reply)
            except Exception as error:  # whatever happened, the task has an outcome
                self._failed = True
                seconds = time.monotonic() - began
                if self._expired:
                    message = f"did not answer within {limit:g} s and was stopped"
                else:
                    status, message = "lost", self._cause(error)
                return Outcome(task.id, task.client, status, message=message, seconds=seconds)

    @contextmanager
    def _limit(self, seconds: float | None) -> Iterator[None]:
        """Kill the process if the block takes longer, which ends the block."""
        if seconds is None:
            yield
            return
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
        if self._expired:
            raise EOFError("the reply came just before the process was killed")

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def _cause(self, error: Exception) -> str:
        """Say why there is no reply."""
        try:
            exit_code = self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:  # it lives, but what it says makes no sense
            self._process.kill()
            return f"its reply cannot be read: {type(error).__name__}: {error}"
        if exit_code >= 0:
            return f"its process ended with exit code {exit_code}"
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {-exit_code}"
        why = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{why}"

    def end(self) -> None:
        """End the process, which also ends a conversation with it, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        if self._talking.acquire(timeout=_FAREWELL):
            for pipe in (self._to, self._from):
                with suppress(OSError):  # what was not sent can't be
                    pipe.close()
            self._talking.release()
