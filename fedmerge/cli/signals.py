"""Ctrl-C and SIGTERM end a command with one line and one code, whenever they come.

While modules are imported an exception would be lost or become another one in code that we do not
know, and there is nothing to clean up: the process ends at once. At work it is an exception, and
what follows while the work is cleaned up is not heard, unless that takes too long.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fedmerge.tracebacks import is_users
from fedmerge.user_code import listening

INTERRUPTED = 130
MESSAGE = "interrupted"
PATIENCE = 10.0  # seconds to clean up before another signal ends the process at once
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2
_asked: list[float] = []  # when the process was first asked to end at work


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """The user, or the system, wants a command to stop; says what is printed then."""


def end_at_once() -> None:
    """From now on, but for a command's work, let signals end the process."""

    def end(number: int, frame: object) -> None:
        if not _asked or time.monotonic() - _asked[0] > PATIENCE:
            _end(MESSAGE)

    _listen(end)
    # Registered first, so called last: Python forgets the handlers while it takes itself down,
    # and a signal would change the code of a command that is over.
    atexit.register(_listen, signal.SIG_IGN)


@contextmanager
def at_work(message: str = MESSAGE) -> Iterator[None]:
    """Let signals raise in the block, so that it cleans up, and leave it as `Interrupted`."""
    heard: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if not heard:
            heard.append(number)
            _asked[:] = [time.monotonic()]
            raise KeyboardInterrupt
        if time.monotonic() - _asked[0] > PATIENCE:
            _end(message)

    def is_heard() -> bool | None:
        if heard:
            return True
        return False if signal.getsignal(signal.SIGINT) in (interrupt, signal.SIG_IGN) else None

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _listen(interrupt)
    try:
        with listening(is_heard), _hearing_again(heard):
            yield
    except BaseException as error:
        # Imports by C code make of an interrupt what they like.
        if heard or (type(error) is KeyboardInterrupt and not is_users(error)):
            raise Interrupted(message) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _hearing_again(heard: list[int]) -> Iterator[None]:
    """Send a signal again whose exception Python had to drop, as in a destructor."""
    before = sys.unraisablehook

    def hear_again(lost: Any) -> None:
        if heard and issubclass(lost.exc_type, KeyboardInterrupt):
            again = threading.Timer(0.01, os.kill, (os.getpid(), heard.pop()))
            again.daemon = True
            again.start()  # only once the destructor is done
        else:
            before(lost)

    sys.unraisablehook = hear_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _end(message: str) -> None:
    with suppress(OSError):
        os.write(_STDERR, f"{message}\n".encode())
    os._exit(INTERRUPTED)


def _listen(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Set a handler, but for signals that whoever started the process wants ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
