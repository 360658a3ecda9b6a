"""Sentences that several readers share when a file cannot be used."""

from pathlib import Path

from fedmerge.decoding import shortened
from fedmerge.errors import CheckpointError


def reason_of(error: BaseException, message: str | None = None) -> str:
    """Return the first line of a library's error or of its message, printable and short."""
    line = ((message or str(error)).strip().splitlines() or [""])[0]
    text = line if " " in line else f"{type(error).__name__}: {line}".removesuffix(": ")
    return shortened(text)  # a bare key or number says nothing by itself


def damaged(path: Path | str, reason: str) -> CheckpointError:
    """Return the error of a file that contradicts itself; the reason may hold names of its own."""
    return CheckpointError(
        f"{path}: truncated or damaged ({shortened(reason)})", "copy or download the file again"
    )


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """Return the error of a file that the system does not hand out."""
    return CheckpointError(f"{path}: cannot be read ({error.strerror or error})")


def listed(names: list[str], most: int = 5) -> str:
    """Join names for a message, counting those beyond `most`.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
