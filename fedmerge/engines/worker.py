"""A worker process: reads tasks from its standard input, writes replies to its standard output."""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import asdict
from typing import IO, Any

from fedmerge.engines.calls import call_work, import_work
from fedmerge.engines.wire import receive, send
from fedmerge.streams import STDERR, STDIN, STDOUT, guard_messages
from fedmerge.types.arrays import Array
from fedmerge.types.work import Place
from fedmerge.user_code import listening

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
