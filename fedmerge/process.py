"""This process and others: its standard streams, interrupts, and how another Python is started."""

from __future__ import annotations

import gc
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

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


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while modules are imported, nor among what they made: all of it stays.

    Torch makes hundreds of thousands of objects, and to look at each again and again takes longer
    than many a merge.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


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
    if nowhere != STDOUT:  # which somebody may have closed
        os.dup2(nowhere, STDOUT)
        os.close(nowhere)


class _Lasting(io.TextIOWrapper):
    """A standard stream that others can't close: what is said after that must be heard, too."""

    def close(self) -> None:
        """Print what was written so far."""
        self.flush()


def _text(raw: io.FileIO, old: object, *, is_flushed: bool) -> io.TextIOWrapper:
    encoding = getattr(old, "encoding", None) or "utf-8"
    # Not every terminal knows every character.
    return _Lasting(io.BufferedWriter(raw), encoding, errors="replace", line_buffering=is_flushed)


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


@dataclass(frozen=True)
class _Surroundings:
    """What code of others may change about this process, while fedmerge relies on it."""

    folder: str
    places: tuple[str, ...]  # where modules are looked for
    depth: int  # of calls within each other
    messages: Any  # the standard error
    device: Any  # where torch makes tensors, None: where it does by itself

    @staticmethod
    def now() -> _Surroundings:
        """Return what holds at present."""
        depth = sys.getrecursionlimit()
        return _Surroundings(_folder(), tuple(sys.path), depth, sys.stderr, _default_device())

    def put_back(self) -> None:
        """Let hold again what others have changed; what they added to it stays."""
        if self.folder and _folder() != self.folder:
            with suppress(OSError):
                os.chdir(self.folder)
        sys.path += [place for place in self.places if place not in sys.path]
        if sys.getrecursionlimit() < self.depth:
            sys.setrecursionlimit(self.depth)
        sys.stderr = self.messages
        if _default_device() != self.device:
            sys.modules["torch"].set_default_device(self.device)


# As they were before the first of the blocks that are active: those of threads may overlap.
_found: list[_Surroundings] = []
_guarded: ContextVar[int] = ContextVar("_guarded", default=0)  # the process of a block
_command = 0  # the process that is one
_end_process = os._exit


@contextmanager
def guarded() -> Iterator[None]:
    """Let code of others change this process for a while only, and not end it without a word."""
    _found.append(_found[0] if _found else _Surroundings.now())
    token, os._exit = _guarded.set(os.getpid()), _end_if_alone
    try:
        yield
    finally:
        _guarded.reset(token)
        _found.pop().put_back()
        if not _found and _command != os.getpid():
            os._exit = _end_process


def keep_to_the_end() -> None:
    """Let this process, which is a command's, end by itself only, whatever other threads do."""
    global _command
    _command = os.getpid()


def _end_if_alone(status: int) -> NoReturn:
    """End a copy of this process, or what a thread of others works on; else as `sys.exit` does.

    In a command threads are no others': there one ends its own work, and no handler the rest.
    """
    if os.getpid() in (_guarded.get(), _command):
        raise SystemExit(f"os._exit({status})")
    _end_process(status)


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # somebody removed it
        return ""


def _default_device() -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # or half of it, being imported
        return None
    found = torch.get_default_device()
    return None if found.type == "cpu" else found


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in another Python."""
    start = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    return [sys.executable, *_SAFE_PATH, "-c", start, *arguments]
