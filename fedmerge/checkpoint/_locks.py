"""Locks on files that end with their process, however it ends."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOOK = 0.01  # seconds between attempts
OPEN_LOCK = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)  # a link would lead out of the folder


@dataclass(frozen=True)
class LockFile:
    """A file that exists, and is locked, while somebody holds it.

    A killed holder leaves the file, but the system ends the lock. Where the file system knows no
    locks, everybody gets one.
    """

    path: Path
    _descriptor: int

    @staticmethod
    def take(path: Path, *, patience: float = 0.0) -> LockFile | None:
        """Create and lock a file; None if somebody else has it for so many seconds more."""
        until = time.monotonic() + patience
        while True:
            descriptor = os.open(path, OPEN_LOCK | os.O_CREAT, 0o666)
            try:
                is_free = try_lock(descriptor) is not False
                if is_free and _is_at(descriptor, path):
                    return LockFile(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if is_free:
                continue  # its last holder removed it before it was locked here
            if time.monotonic() >= until:
                return None
            time.sleep(_LOOK)

    def release(self) -> None:
        """Remove the file, then let others have its name."""
        if sys.platform == "win32":  # nobody removes an open file there
            os.close(self._descriptor)
            with suppress(OSError):  # the next one has it already
                self.path.unlink()
        else:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file unless somebody else has; None where the file system knows no locks."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
