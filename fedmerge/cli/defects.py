"""What nobody foresaw becomes an error like any other: one line, and its traceback with -v."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedmerge.cli.signals import Interrupted
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import FedmergeError
from fedmerge.streams import Unprintable
from fedmerge.tracebacks import failure_of


@contextmanager
def foreseen(terminal: Terminal) -> Iterator[None]:
    """Let nothing leave but fedmerge's own errors, interrupts, and an output that can't be printed.

    Typer takes some exceptions for what it knows: `EOFError`, say, for Ctrl-D.
    """
    try:
        yield
    except (Interrupted, Unprintable):
        raise
    except BaseException as error:
        failure = failure_of(error)
        show_details(failure, terminal)
        raise failure from error


def show_details(error: FedmergeError, terminal: Terminal) -> None:
    """Show the traceback of code that failed, if that is wanted."""
    if error.details:
        terminal.detail(error.details)
