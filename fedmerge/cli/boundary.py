"""The one place where exceptions become messages and exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import typer

from fedmerge.cli.defects import show_details
from fedmerge.cli.signals import INTERRUPTED, MESSAGE, Interrupted
from fedmerge.cli.terminal import Terminal, plain
from fedmerge.errors import FedmergeError, UsageError
from fedmerge.streams import Unprintable, discard_results, guard_messages, guard_results
from fedmerge.tracebacks import failure_of, forget_users

# Newer typers bring a click of their own, so its base error is found through one that they export.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]


@dataclass
class Session:
    """What is known of a run when it fails: whether the answer is to be JSON."""

    json: bool


def main() -> None:
    """Run the command line and exit with its code."""
    guard_results()
    guard_messages()
    if not sys.stdout.isatty() and "FORCE_COLOR" not in os.environ:
        os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"  # which takes some CI logs for one
    sys.exit(printed(lambda: run(sys.argv[1:])))


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
    forget_users()
    try:
        from fedmerge.cli.app import app

        code = app(args=list(arguments), standalone_mode=False, prog_name="fedmerge", obj=session)
    except FedmergeError as error:
        return report(error, as_json=session.json)
    except _ClickError as error:
        return _report_usage(error, session.json)
    except (Interrupted, typer.Abort) as error:
        print(str(error) or MESSAGE, file=sys.stderr)
        return INTERRUPTED
    except (Unprintable, SystemExit):  # the latter is typer's, of a shell that completes
        raise
    except BaseException as error:
        return _report_unforeseen(error, arguments)
    return code if isinstance(code, int) else 0


def _report_unforeseen(error: BaseException, arguments: Sequence[str]) -> int:
    """Report what failed before a command was at work."""
    failure = failure_of(error)
    show_details(failure, Terminal(verbose=bool({"-v", "--verbose"} & set(arguments))))
    return report(failure, as_json="--json" in arguments)


def report(error: FedmergeError, *, as_json: bool) -> int:
    """Print an error, one line for the problem and one for the hint, and return its code."""
    print(f"error: {_one_line(error.problem)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {_one_line(error.hint)}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": error_to_json(error)}))
    return error.exit_code or FedmergeError.exit_code  # no failure is a success, whoever made it


def _one_line(text: str) -> str:
    """Return a text with control characters and line ends escaped: a file's name may hold any."""
    return plain(text).replace("\n", "\\n")


def error_to_json(error: FedmergeError) -> dict[str, object]:
    """Return an error as `--json` reports it."""
    return {
        "kind": error.kind,
        "problem": error.problem,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }


def _report_usage(error: Exception, as_json: bool) -> int:
    """Report what typer says about a wrong command line."""
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", lambda: str(error))()).strip()
    command = context.command_path if context is not None else "fedmerge"
    return report(UsageError(message, f"see `{command} --help`"), as_json=as_json)
