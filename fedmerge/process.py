"""This process and others: its standard streams, interrupts, and how another Python is started."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


Heard: TypeAlias = Callable[[], bool | None]

STDIN, STDOUT, STDERR = 0, 1, 2
_heard: ContextVar[Heard] = ContextVar("_heard", default=lambda: None)
# `python -c` puts the current folder before the standard library, where a `signal.py` would be run;
# newer Pythons have an option against it.
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


class Unprintable(BaseException):
    """Standard output takes no more; no failure of whatever printed."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason.strerror or str(reason))
        self.is_unread = isinstance(reason, BrokenPipeError)


class _Patient(io.FileIO):
    """A file that waits where somebody else made it non-blocking."""

    def write(self, content: ReadableBuffer, /) -> int:
        """Write some of the content and return how much."""
        while (count := super().write(content)) is None:
            select.select([], [self], [])
        return count


class _Results(_Patient):
    """A standard output whose failures are known as such."""

    def write(self, content: ReadableBuffer, /) -> int:
        """Write as any file does."""
        try:
            return super().write(content)
        except OSError as error:
            raise Unprintable(error) from error


class _Messages(_Patient):
    """A standard error that never fails: there is nobody to be told."""

    def write(self, content: ReadableBuffer, /) -> int:
        """Write as far as that is possible."""
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def open_closed_streams() -> None:
    """Let streams that the process was started without lead nowhere.

    The next file that is opened would get a closed stream's number, and all that libraries print.
    """
    for number in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(nowhere, True)


def guard_results() -> None:
    """Let a standard output that takes no more raise `Unprintable`."""
    is_seen = os.isatty(STDOUT)
    sys.stdout = _text(_Results(STDOUT, "w", closefd=False), sys.stdout, is_flushed=is_seen)


def guard_messages() -> None:
    """Let nothing fail that is printed to standard error."""
    sys.stderr = _text(_Messages(STDERR, "w", closefd=False), sys.stderr, is_flushed=True)


def discard_results() -> None:
    """Let all that is still to be printed to standard output lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.close(nowhere)


def _text(raw: io.FileIO, old: object, *, is_flushed: bool) -> io.TextIOWrapper:
    encoding = getattr(old, "encoding", None) or "utf-8"
    # Not every terminal knows every character.
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="replace", line_buffering=is_flushed
    )


@contextmanager
def listening(heard: Heard) -> Iterator[None]:
    """Let `heard` tell for a while whether the user interrupted (None: it can't know)."""
    token = _heard.set(heard)
    try:
        yield
    finally:
        _heard.reset(token)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether the user wants to stop, whatever code made of that."""
    heard = _heard.get()()
    return type(error) is KeyboardInterrupt if heard is None else heard


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in another Python."""
    start = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    return [sys.executable, *_SAFE_PATH, "-c", start, *arguments]
