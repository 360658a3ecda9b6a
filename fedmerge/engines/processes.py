"""The engine that runs client work in processes of this machine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any, TypeAlias

import numpy as np

from fedmerge.engines.engine import (
    START_LIMIT,
    ClientInfo,
    Outcome,
    Status,
    Task,
    call_work,
    import_work,
    thread_limits,
    usable_cores,
)
from fedmerge.process import STDERR, STDIN, STDOUT, guard_messages, listening, python_command
from fedmerge.values.arrays import Array
from fedmerge.values.work import Arrays, JsonObject, Place

HEADER_LENGTH = 8  # bytes


def send(stream: IO[bytes], message: JsonObject, arrays: Arrays) -> None:
    """Write one message and flush it."""
    contiguous = {name: np.require(array, requirements="C") for name, array in arrays.items()}
    entries = [[name, array.dtype.str, array.shape] for name, array in contiguous.items()]
    header = json.dumps({"message": dict(message), "arrays": entries}).encode()
    stream.write(len(header).to_bytes(HEADER_LENGTH, "little") + header)
    for array in contiguous.values():
        stream.write(_bytes_of(array))
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read one message; `EOFError` where the stream ends before it does."""
    length = int.from_bytes(_exactly(stream, HEADER_LENGTH), "little")
    header = json.loads(_exactly(stream, length))
    arrays: dict[str, Array] = {}
    for name, dtype, shape in header["arrays"]:
        arrays[name] = np.empty(shape, dtype)
        _fill(stream, _bytes_of(arrays[name]))
    return header["message"], arrays


def _bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array without copying them."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _exactly(stream: IO[bytes], count: int) -> bytes:
    content = bytearray(count)
    _fill(stream, memoryview(content))
    return bytes(content)


def _fill(stream: IO[bytes], target: memoryview) -> None:
    """Read until the target is full."""
    while len(target):
        count = stream.readinto(target)  # type: ignore[attr-defined]  # typeshed leaves it out
        if not count:
            raise EOFError("the stream ended inside a message")
        target = target[count:]


_Message = tuple[dict[str, Any], dict[str, Array]]


def main() -> None:
    """Do one task after the other until the parent closes the pipe or dies."""
    inbox, outbox = _own_streams()
    tasks: queue.SimpleQueue[_Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(inbox, tasks), daemon=True).start()
    while True:
        message, arrays = tasks.get()
        function, settings = message["function"], message["settings"]
        import_work(function)
        send(outbox, {"started": True}, {})  # imports took their time; the client's begins now
        with listening(lambda: False):  # interrupts are the parent's
            reply = call_work(function, arrays, settings, Place(**message["place"]))
        del arrays  # the next task must not find this one's in memory
        header = {name: value for name, value in vars(reply).items() if name != "arrays"}
        send(outbox, header, reply.arrays)


def task_message(function: str, settings: Any, place: Place) -> dict[str, Any]:
    """Return what a worker must be told besides the arrays."""
    return {"function": function, "settings": settings, "place": asdict(place)}


def _own_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Return the pipes from and to the parent, out of reach of code that reads or prints."""
    inbox, outbox = os.fdopen(os.dup(STDIN), "rb"), os.fdopen(os.dup(STDOUT), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    os.dup2(STDERR, STDOUT)
    guard_messages()  # a client does not fail for what it can't print
    return inbox, outbox


def _listen(inbox: IO[bytes], tasks: queue.SimpleQueue[_Message]) -> None:
    """Hand on what arrives; the end of the pipe ends the process, whatever it is doing."""
    try:
        while True:
            tasks.put(receive(inbox))
    finally:
        os._exit(0)


_FAREWELL = 5.0  # seconds for a worker to leave by itself
_LOOK = 0.5  # seconds after which a wait is begun again
_WORKER = "from fedmerge.engines.processes import main; main()"
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
                seat, outcome = _next(ended)
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


def _next(ended: _Ended) -> tuple[_Seat, Outcome]:
    """Return the next task that ended.

    Python hears signals in its main thread. One that the system gave to another thread, as it does
    while a process is started, would wait for as long as the main thread does.
    """
    while True:
        with suppress(queue.Empty):
            return ended.get(timeout=_LOOK)


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
            python_command(_WORKER),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **thread_limits(threads)},
            start_new_session=True,  # Ctrl-C is the parent's, which decides
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
        """End the process, which also ends a conversation with it, and wait until it is gone.

        Not for ever: an interrupt may come between a lock of `subprocess` and its release.
        """
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL)
        if self._talking.acquire(timeout=_FAREWELL):
            for pipe in (self._to, self._from):
                with suppress(OSError):  # what was not sent can't be
                    pipe.close()
            self._talking.release()
