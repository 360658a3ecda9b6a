"""What a task of Ray does in its worker process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from fedmerge.engines.calls import Reply, call_work, import_work
from fedmerge.types.work import Arrays, JsonObject, Place
from fedmerge.user_code import listening

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
