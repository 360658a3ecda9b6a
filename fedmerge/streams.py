"""Standard streams that are there, whatever the process was started with."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


STDIN, STDOUT, STDERR = 0, 1, 2


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
