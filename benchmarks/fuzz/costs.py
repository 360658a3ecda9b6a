"""What a piece of work in this process took: CPU time, and memory at its peak, copies included."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path

from benchmarks.fuzz.promises import Cost

_STATUS = Path("/proc/self/status")
_FORGET = Path("/proc/self/clear_refs")
_copies: list[int] = []  # bytes that each copy of this process took since the work began


def forget_peak() -> Cost:
    """Begin a piece of work: return what was used up to now, with the memory that is in use."""
    _copies.clear()
    with contextlib.suppress(OSError):  # where it only ever grows, less is seen
        _FORGET.write_text("5")  # the peak is what is in use from now on
    return Cost(_seconds(), _peak())


def cost_since(before: Cost) -> Cost:
    """Return what was used since, by processes that this one waited for, too."""
    own = max(0, _peak() - before.memory)
    return Cost(_seconds() - before.seconds, own + max(_copies, default=0))


def add_copy(memory: int) -> None:
    """Take note of what a copy of this process took besides, while this one waited."""
    _copies.append(memory)


def _seconds() -> float:
    """Return the CPU seconds of this process and of those that it waited for."""
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + others.ru_utime + others.ru_stime


def _peak() -> int:
    """Return the largest number of bytes that were in use at once."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
