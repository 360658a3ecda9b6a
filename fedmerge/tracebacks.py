"""Errors in one line and in full, and whose they are: the user's, the machine's or our own."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from fedmerge.errors import Defect, FedmergeError, UserCodeError

_MOST_MESSAGE = 400  # characters of an error's own text in one line
_MOST_TRACEBACK = 40_000  # characters; the middle of a longer one is left out
_OWN = str(Path(__file__).parent)
_LIBRARIES = tuple(
    {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_MEMORY_HINT = "close other programs, or use a machine with more memory"
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # torch's words
USERS: set[str] = set()  # files and folders that the user's code was loaded from


def last_line(error: BaseException) -> str:
    """Return an error as a traceback ends with it, and where in the user's code it was raised.

    >>> last_line(ValueError("no\\nsuch thing"))
    'ValueError: no such thing'
    """
    where = _users_line(error)
    return f"{headline(error)} ({where})" if where else headline(error)


def whole_traceback(error: BaseException) -> str:
    """Return an error's traceback, with its middle left out where it is endless."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except MemoryError:
        return ""
    return _shortened(text.rstrip(), _MOST_TRACEBACK)


def failure_of(error: BaseException) -> FedmergeError:
    """Return the error that an exception amounts to which nobody expected."""
    if isinstance(error, FedmergeError):
        return error
    details = whole_traceback(error)
    if is_users(error):
        return UserCodeError(f"your code fails: {last_line(error)}", details=details)
    if is_out_of_memory(error):
        return FedmergeError("out of memory", _MEMORY_HINT, details=details)
    if isinstance(error, OSError):
        return FedmergeError(message_of(error), details=details)
    return defect(f"{headline(error)}{_own_line(error)}", details=details)


def defect(what: str, *, details: str) -> Defect:
    """Return the error of something that is wrong in fedmerge itself."""
    return Defect(
        f"a defect in fedmerge: {what}",
        "-v shows the traceback; please report it with the command",
        details=details,
    )


def is_users(error: BaseException) -> bool:
    """Return whether an error was raised in code that was loaded for the user, not in ours."""
    for file, _ in reversed(list(_steps(error))):
        if _is_in(file, _OWN):
            return False
        if _is_users_file(file):
            return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory left."""
    if isinstance(error, MemoryError):
        return True
    is_torchs = isinstance(error, RuntimeError)
    return is_torchs and any(words in message_of(error) for words in _NO_MEMORY)


def shown_line(file: str, line: int) -> str:
    """Return a line of code as the user would look for it."""
    return f"{_shown(file)}:{line}"


def headline(error: BaseException) -> str:
    """Return an error's kind and text in one line."""
    return f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")


def message_of(error: BaseException) -> str:
    """Return an error's own text in one line."""
    try:
        text = " ".join(str(error).split())
    except BaseException:
        return "it can't be shown"
    return _shortened(text, _MOST_MESSAGE)


def _shortened(text: str, most: int) -> str:
    """Return a text without its middle, if it is too long."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def _users_line(error: BaseException) -> str:
    """Return file and line of the last step in code that is no library's, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return shown_line(error.filename, error.lineno or 0)
    for file, line in reversed(list(_steps(error))):
        if not _is_in(file, _OWN) and (_is_users_file(file) or not _is_library(file)):
            return shown_line(file, line)
    return ""


def _own_line(error: BaseException) -> str:
    """Return file and line of the last step in fedmerge."""
    for file, line in reversed(list(_steps(error))):
        if _is_in(file, _OWN):
            return f" ({Path(file).relative_to(Path(_OWN).parent)}:{line})"
    return ""


def _steps(error: BaseException) -> Iterator[tuple[str, int]]:
    """Yield file and line of every step to where an error was raised, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _is_users_file(file: str) -> bool:
    """Return whether a file is the user's: libraries beside it are only if they were named."""
    found = [place for place in USERS if _is_in(file, place)]
    return any(_is_library(place) for place in found) or (bool(found) and not _is_library(file))


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(_is_in(file, folder) for folder in _LIBRARIES)


def _is_in(file: str, place: str) -> bool:
    return file == place or file.startswith(place.rstrip(os.sep) + os.sep)


def _shown(file: str) -> str:
    """Return a path as the user would give it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
