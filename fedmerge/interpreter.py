"""Other Pythons: how code is run in a process of its own."""

from __future__ import annotations

import sys

# `python -c` puts the current folder before the standard library, where a `signal.py` would be run;
# newer Pythons have an option against it.
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in another Python."""
    start = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    return [sys.executable, *_SAFE_PATH, "-c", start, *arguments]
