"""Hidden names for files on their way, and what killed runs left of theirs.

Every run claims its names by a lock on a file of its own, so that whoever comes later can tell a
run that is still writing from one that was killed. Locks are believed among processes of one
system only: on a file system that several machines share, another one's files are left for a day.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedmerge.checkpoint._locks import OPEN_LOCK, LockFile, try_lock

ABANDONED = 86_400.0  # seconds after which files are left whose run can't be asked
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux: the same in all containers of a system
_NAME = re.compile(r"(\.fedmerge-([0-9a-f]{8})-[0-9a-f]{16})(?:-[0-9]+)?\.tmp")


def claim_names(folder: Path) -> LockFile:
    """Return the claim, held until it is released, on hidden names in a folder."""
    while True:  # a sweep may take a claim for a dead one in the moment before it is locked
        lock = LockFile.take(folder / f".fedmerge-{_system()}-{secrets.token_hex(8)}.tmp")
        if lock is not None:
            return lock


def hidden_name(claim: LockFile, number: int) -> Path:
    """Return one of the names that a claim is for."""
    return claim.path.with_name(f"{claim.path.stem}-{number}.tmp")


def sweep(folder: Path) -> None:
    """Remove the hidden files of runs that are no more; what can't be removed stays."""
    runs: dict[str, list[Path]] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            if found := _NAME.fullmatch(path.name):
                runs.setdefault(found[1], []).append(path)
    for stem, files in runs.items():
        with suppress(OSError):
            _sweep_run(folder / f"{stem}.tmp", files)


def _sweep_run(claim: Path, files: list[Path]) -> None:
    """Remove the files of one run if it is over: its claim last, which guards the others."""
    others = [path for path in files if path != claim]
    found = _NAME.fullmatch(claim.name)
    assert found is not None
    if found[2] != _system() or claim not in files:
        if _age(files) > ABANDONED:
            _remove([*others, claim])
        return
    descriptor = os.open(claim, OPEN_LOCK)
    try:
        is_over = try_lock(descriptor)
        if is_over or (is_over is None and _age(files) > ABANDONED):
            _remove([*others, claim])
    finally:
        os.close(descriptor)


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _age(files: Iterable[Path]) -> float:
    """Return how many seconds ago the youngest file was written."""
    return time.time() - max(path.stat().st_mtime for path in files)


@cache
def _system() -> str:
    """Return what tells the running system from others that share its file systems."""
    try:
        identity = _BOOT.read_text()
    except OSError:
        identity = platform.node()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
