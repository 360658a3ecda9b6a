"""Exit codes: errors to messages, and signals that end a command with one line.

While modules are imported an exception would be lost or become another one in code that we do not
know, and there is nothing to clean up: the process ends at once. At work it is an exception, and
what follows while the work is cleaned up is not heard, unless that takes too long. It may be raised
anywhere, also where nothing of `at_work` can catch it: `run` has the last word.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedmerge.cli.output import SCHEMA, Terminal, bounded, plain
from fedmerge.errors import FedmergeError, UsageError
from fedmerge.process import (
    Unprintable,
    discard_results,
    guard_messages,
    guard_results,
    keep_to_the_end,
    listening,
    open_closed_streams,
)
from fedmerge.tracebacks import failure_of, is_users

if TYPE_CHECKING:
    from fedmerge.cli.command_line import Command

INTERRUPTED = 130
MESSAGE = "interrupted"
PATIENCE = 10.0  # seconds to clean up before another signal ends the process at once
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2
_end_process = os._exit  # which is another one while the user's code runs
_asked: list[tuple[float, str]] = []  # when the process was asked to end at work; what it says then


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """The user, or the system, wants a command to stop; says what is printed then."""


def end_at_once() -> None:
    """From now on, but for a command's work, let signals end the process."""

    def end(number: int, frame: object) -> None:
        if not _asked or _is_late():
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
        if not heard:  # another signal may be handled between any two of these lines
            _asked[:] = [(time.monotonic(), message)]
            heard.append(number)
            raise KeyboardInterrupt
        if _is_late():
            _end(message)

    def is_heard() -> bool | None:
        if heard:
            return True
        return False if signal.getsignal(signal.SIGINT) in (interrupt, signal.SIG_IGN) else None

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        _listen(interrupt)
        with listening(is_heard), _hearing_again(heard):
            yield
    except GeneratorExit:  # of this block, if an interrupt came as it was left: `run` knows of it
        raise
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
    """Send a signal again whose exception Python had to drop, as in a destructor.

    What else destructors complain of after a signal is that something was left half done.
    """
    before = sys.unraisablehook

    def hear_again(lost: Any) -> None:
        if not heard:
            before(lost)
        elif issubclass(lost.exc_type, KeyboardInterrupt):
            # A bare thread: the destructor may run while this one holds locks of `threading`.
            _thread.start_new_thread(_send_again, (heard.pop(),))

    sys.unraisablehook = hear_again
    try:
        yield
    except BaseException as error:
        if heard:
            traceback.clear_frames(error.__traceback__)  # their objects end here, and not later
        raise
    finally:
        sys.unraisablehook = before


def _send_again(number: int) -> None:
    time.sleep(0.01)  # until the destructor is done
    os.kill(os.getpid(), number)


def _is_late() -> bool:
    """Return whether the process was asked to end so long ago that it is not going to."""
    return time.monotonic() - _asked[0][0] > PATIENCE


def _end(message: str) -> None:
    with suppress(OSError):
        os.write(_STDERR, f"{message}\n".encode())
    _end_process(INTERRUPTED)


def _listen(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Set a handler, but for signals that whoever started the process wants ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def foreseen(terminal: Terminal) -> Iterator[None]:
    """Let nothing leave but fedmerge's own errors, interrupts, and an output that can't be printed.

    Typer takes some exceptions for what it knows: `EOFError`, say, for Ctrl-D.
    """
    try:
        yield
    except (Interrupted, Unprintable, GeneratorExit):
        raise
    except BaseException as error:
        failure = failure_of(error)
        show_details(failure, terminal)
        raise failure from error


def show_details(error: FedmergeError, terminal: Terminal) -> None:
    """Show the traceback of code that failed, if that is wanted."""
    if error.details:
        terminal.detail(error.details)


@dataclass
class Session:
    """What is known of a run when it fails: whether the answer is to be JSON, and the command."""

    json: bool
    command: Command | None = None

    def speak(self, text: str) -> str:
        """Return a message with options as they are typed."""
        return text if self.command is None else self.command.speak(text)


def main() -> None:
    """Run the command line and exit with its code."""
    end_at_once()  # before anything is imported that takes its time
    open_closed_streams()  # before anything is opened
    guard_results()
    guard_messages()
    keep_to_the_end()
    code = printed(lambda: run(sys.argv[1:]))
    # Python ends by SIGINT, whatever the code, if an interrupt once left the `exec` of a text, as
    # those in which dataclasses are made: until the next one.
    exec("")
    sys.exit(code)


def printed(command: Callable[[], int]) -> int:
    """Return a command's exit code, or 1 if not all that it says can be printed."""
    try:
        code = command()
        sys.stdout.flush()
    except Unprintable as reason:
        if not reason.is_unread:  # else nobody wants to hear of it
            print(f"error: the output can't be printed: {reason}", file=sys.stderr)
        discard_results()
        return 1
    return code


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; only fedmerge's own errors become messages."""
    session = Session(json="--json" in arguments)
    _asked.clear()
    try:
        import typer

        from fedmerge.cli.app import app
    except BaseException as error:
        return _report_unforeseen(error, arguments)
    # Newer typers bring a click of their own: its base error is found through one they export.
    click_error: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        code = app(args=list(arguments), standalone_mode=False, prog_name="fedmerge", obj=session)
    except (Unprintable, SystemExit):  # the latter is typer's, of a shell that completes
        raise
    except BaseException as error:
        if _asked or isinstance(error, (Interrupted, typer.Abort)):
            print(_asked[0][1] if _asked else str(error) or MESSAGE, file=sys.stderr)
            return INTERRUPTED
        if isinstance(error, FedmergeError):
            return report(error, session)
        if isinstance(error, click_error):
            return _report_usage(error, session, arguments)
        return _report_unforeseen(error, arguments)
    return code if isinstance(code, int) else 0


def _report_unforeseen(error: BaseException, arguments: Sequence[str]) -> int:
    """Report what failed before a command was at work."""
    failure = failure_of(error)
    show_details(failure, Terminal(verbose=bool({"-v", "--verbose"} & set(arguments))))
    return report(failure, Session(json="--json" in arguments))


def report(error: FedmergeError, session: Session) -> int:
    """Print an error, one line for the problem and one for the hint, and return its code."""
    told = error_to_json(error, session.speak)
    print(f"error: {_one_line(str(told['problem']))}", file=sys.stderr)
    if error.hint:
        print(f"hint: {_one_line(str(told['hint']))}", file=sys.stderr)
    if session.json:
        print(json.dumps({"schema": SCHEMA, "error": told}))
    return error.exit_code or FedmergeError.exit_code  # no failure is a success, whoever made it


def _one_line(text: str) -> str:
    """Return a text with control characters and line ends escaped: a file's name may hold any."""
    return plain(text).replace("\n", "\\n")


def error_to_json(error: FedmergeError, speak: Callable[[str], str] = str) -> dict[str, object]:
    """Return an error as `--json` reports it."""
    return {
        "kind": error.kind,
        "problem": bounded(speak(error.problem)),
        "hint": bounded(speak(error.hint)),
        "exit_code": error.exit_code,
    }


def _report_usage(error: Exception, session: Session, arguments: Sequence[str]) -> int:
    """Report what typer says about a wrong command line."""
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", lambda: str(error))()).strip()
    path = context.command_path if context is not None else "fedmerge"
    moved = _moved(getattr(error, "option_name", None), path.split()[-1], arguments)
    return report(moved or UsageError(message, f"see `{path} --help`"), session)


def _moved(option: str | None, command: str, arguments: Sequence[str]) -> UsageError | None:
    """Return what to type in place of an option of earlier versions."""
    from fedmerge.cli.command_line import moved_option
    from fedmerge.cli.commands import COMMANDS

    if option is None or command not in COMMANDS:
        return None
    return moved_option(COMMANDS[command], option, arguments)
