"""Ctrl-C and SIGTERM end a command with one line and one code, whenever they come.

While modules are imported an exception would be lost or become another one in code that we do not
know, and there is nothing to clean up: the process ends at once. At work it is an exception.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedmerge.tracebacks import is_users
from fedmerge.user_code import listening

INTERRUPTED = 130
MESSAGE = "interrupted"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """The user, or the system, wants a command to stop; says what is printed then."""


def end_at_once() -> None:
    """From now on, but for a command's work, let signals end the process."""

    def end(number: int, frame: object) -> None:
        os.write(_STDERR, f"{MESSAGE}\n".encode())
        os._exit(INTERRUPTED)

    _listen(end)


@contextmanager
def at_work(message: str = MESSAGE) -> Iterator[None]:
    """Let signals raise in the block, so that it cleans up, and leave it as `Interrupted`."""
    heard: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    def is_heard() -> bool | None:
        if heard:
            return True
        return False if signal.getsignal(signal.SIGINT) in (interrupt, signal.SIG_IGN) else None

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _listen(interrupt)
    try:
        with listening(is_heard):
            yield
    except BaseException as error:
        # Imports by C code make of an interrupt what they like.
        if heard or (type(error) is KeyboardInterrupt and not is_users(error)):
            raise Interrupted(message) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(handler: Callable[[int, object], None]) -> None:
    """Set a handler, but for signals that whoever started the process wants ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
