"""Start another Python: with this one's import path, and nothing of the current folder."""

from __future__ import annotations

import sys

# `python -c` puts the current folder before the standard library, where a `signal.py` would be
# run; newer Pythons have an option against it. Modules of the standard library come first.
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
_START = (
    "import sys; sys.path[:] = [folder for folder in sys.path if folder]; {first}"
    "sys.path[:] = {path!r}; {code}"
)
_IGNORE_SIGNALS = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
)


def python_command(code: str, *arguments: str, heeds_signals: bool = True) -> list[str]:
    """Return the command that runs code in another Python.

    `heeds_signals`: if not, Ctrl-C and SIGTERM are ignored before anything else is imported: they
    reach this process, too, which then decides.
    """
    first = "" if heeds_signals else _IGNORE_SIGNALS
    start = _START.format(first=first, path=sys.path, code=code)
    return [sys.executable, *_SAFE_PATH, "-c", start, *arguments]
