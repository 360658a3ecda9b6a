"""Outputs are whole or absent: locks, staged files, leftovers of killed runs."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from fedmerge.errors import CheckpointError, UsageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOOK = 0.01  # seconds between attempts
OPEN_LOCK = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)  # a link would lead out of the folder


@dataclass(eq=False)
class LockFile:
    """A file that exists, and is locked, while somebody holds it.

    A killed holder leaves the file, but the system ends the lock. Where the file system knows no
    locks, everybody gets one. An interrupt may come between any two steps: a lock is known before
    its file is there, and until it is gone.
    """

    path: Path
    _descriptor: int | None = None
    _is_held: bool = False

    @staticmethod
    def take(path: Path, *, patience: float = 0.0) -> LockFile | None:
        """Create and lock a file; None if somebody else has it for so many seconds more."""
        lock = LockFile(path)
        _known.add(lock)
        try:
            if lock._try_for(patience):
                return lock
        except BaseException:
            lock.release()
            raise
        _known.discard(lock)
        return None

    def _try_for(self, patience: float) -> bool:
        until = time.monotonic() + patience
        while True:
            self._descriptor = os.open(self.path, OPEN_LOCK | os.O_CREAT, 0o666)
            is_free = try_lock(self._descriptor) is not False
            self._is_held = is_free and _is_at(self._descriptor, self.path)
            if self._is_held:
                return True
            self._close()
            if is_free:
                continue  # its last holder removed it before it was locked here
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK)

    def release(self) -> None:
        """Remove the file unless others have it, then let them have its name; once is enough."""
        if self._descriptor is None and self in _known:  # the file may be there all the same
            with suppress(OSError):
                self._descriptor = os.open(self.path, OPEN_LOCK)
        if self._descriptor is not None and self._is_ours(self._descriptor):
            if sys.platform == "win32":  # nobody removes an open file there
                self._close()
                with suppress(OSError):  # the next one has it already
                    self.path.unlink()
            else:
                self.path.unlink(missing_ok=True)
        self._close()
        _known.discard(self)

    def _is_ours(self, descriptor: int) -> bool:
        is_held = self._is_held or try_lock(descriptor) is not False
        return is_held and _is_at(descriptor, self.path)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_known: set[LockFile] = set()  # taken, or about to be


def leave_nothing() -> None:
    """Remove what interrupted work of this process left: in the end, when no interrupt comes."""
    for lock in tuple(_known):
        with suppress(OSError):
            give_up(lock)


atexit.register(leave_nothing)
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_known.clear)  # they are the other process's


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


ABANDONED = 86_400.0  # seconds after which files are left whose run can't be asked
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux: the same in all containers of a system
_NAME = re.compile(r"(\.fedmerge-([0-9a-f]{8})-[0-9a-f]{16})(?:-[0-9]+)?\.tmp")


def claim_names(folder: Path) -> LockFile:
    """Return the claim, held until it is released, on hidden names in a folder."""
    while True:  # a sweep may take a claim for a dead one in the moment before it is locked
        lock = LockFile.take(folder / f".fedmerge-{_system()}-{secrets.token_hex(8)}.tmp")
        if lock is not None:
            return lock


def give_up(claim: LockFile) -> None:
    """Release a claim; of its files those go, too, whose own removal an interrupt prevented."""
    if _NAME.fullmatch(claim.path.name):
        _remove(claim.path.parent.glob(f"{claim.path.stem}-*.tmp"))
    claim.release()


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


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
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


_LOCK = ".fedmerge.lock"  # in the folder of outputs, while they get their names
_PATIENCE = 60.0  # seconds for other runs to give theirs
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Staging:
    """Files being written under hidden names, next to where they belong."""

    _stack: ExitStack
    _files: dict[Path, tuple[Path, BinaryIO]] = field(default_factory=dict)
    _claims: dict[Path, LockFile] = field(default_factory=dict)  # by folder

    def create(self, path: Path) -> BinaryIO:
        """Open a new hidden file that `commit` gives the name `path`."""
        if path.parent not in self._claims:
            sweep(path.parent)
            claim = self._claims[path.parent] = claim_names(path.parent)
            self._stack.callback(give_up, claim)
        hidden = hidden_name(self._claims[path.parent], len(self._files))
        # "x" and no tempfile: the mode then follows the umask as for any other file.
        self._stack.callback(hidden.unlink, missing_ok=True)
        file = self._stack.enter_context(hidden.open("xb+"))
        self._files[path] = (hidden, file)
        return file

    @property
    def paths(self) -> tuple[Path, ...]:
        """What the files are going to be called, in the order of their creation."""
        return tuple(self._files)

    def finish(self, path: Path) -> None:
        """Put a file on disk and close it."""
        _, file = self._files[path]
        if not file.closed:
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def commit(
        self,
        *,
        force: bool,
        again: bool = False,
        order: Sequence[Path] | None = None,
        gone: Sequence[Path] = (),
    ) -> None:
        """Put all files on disk, then give them their names, in order (default: of creation).

        If a name can't be given, nothing is changed. Without `force`, one that was taken meanwhile
        can't; `again`: a file with the same content is taken for this one, written before. With
        it, old files are replaced, and those that shall be `gone` removed before.
        """
        order = self.paths if order is None else order
        assert sorted(order) == sorted(self._files)
        for path in order:
            self.finish(path)
        if force:
            self._replace(order, gone)
        else:
            self._give_new_names(order, again=again)
        for folder in {path.parent for path in order}:
            sync_folder(folder)

    def _replace(self, order: Sequence[Path], gone: Sequence[Path]) -> None:
        new = [path for path in order if not (path.exists() or path.is_symlink())]
        kept = self._kept(list(dict.fromkeys([*order, *gone])))
        try:
            for path in gone:
                path.unlink(missing_ok=True)
            for path in order:
                os.replace(self._files[path][0], path)  # noqa: PTH105 (atomic on every system)
        except BaseException:
            for path, old in kept.items():
                _restore(path, old)
            for path in new:
                if not self._files[path][0].exists():  # it has the name `path` now
                    path.unlink(missing_ok=True)
            raise

    def _kept(self, paths: Sequence[Path]) -> dict[Path, Path]:
        """Give old files hidden names, too, as far as there are hard links.

        So nothing is lost if the new ones can't be named, and each takes its place at once: what a
        replaced file filled is set free later.
        """
        kept: dict[Path, Path] = {}
        for number, path in enumerate(paths, start=len(self._files)):
            hidden = hidden_name(self._claims[path.parent], number)
            self._stack.callback(hidden.unlink, missing_ok=True)
            with suppress(OSError):
                os.link(path, hidden)
                kept[path] = hidden
        return kept

    def _give_new_names(self, order: Sequence[Path], *, again: bool) -> None:
        try:
            for path in order:
                hidden, _ = self._files[path]
                if not (_give_new_name(hidden, path) or (again and _is_same(hidden, path))):
                    raise UsageError(
                        f"{path}: exists already, it was written meanwhile",
                        "overwrite it with `force`, or choose another name",
                    )
        except BaseException:
            for path in reversed(order):
                if _is_named(self._files[path][0], path):
                    path.unlink(missing_ok=True)
            raise


@contextmanager
def staging() -> Iterator[Staging]:
    """Yield a `Staging` whose files disappear unless they are committed."""
    with ExitStack() as stack:
        yield Staging(stack)


@contextmanager
def naming_alone(folder: Path) -> Iterator[None]:
    """Let no other run give names in a folder meanwhile, so that files of two never mix."""
    lock = LockFile.take(folder / _LOCK, patience=_PATIENCE)
    if lock is None:
        raise CheckpointError(f"{folder}: another run has been writing here for {_PATIENCE:g} s")
    try:
        yield
    finally:
        lock.release()


def _give_new_name(hidden: Path, path: Path) -> bool:
    """Give a file a name that nobody has; return whether that was so.

    The hidden name may stay beside it.
    """
    try:
        os.link(hidden, path)  # unlike a rename, it never replaces
    except FileExistsError:
        return False
    except OSError:  # no hard links here: between the question and the rename others might come
        if path.exists() or path.is_symlink():
            return False
        hidden.rename(path)
    return True


def _is_named(hidden: Path, path: Path) -> bool:
    """Return whether a hidden file was given a name, whether or not that was noted."""
    try:
        return path.samefile(hidden)
    except FileNotFoundError:
        return not hidden.exists()


def _restore(path: Path, old: Path) -> None:
    """Give a name back to the old file that had it."""
    if not path.exists():
        os.link(old, path)
    elif not path.samefile(old):
        os.replace(old, path)  # noqa: PTH105


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two files have the same content."""
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            left, right = first.read(_CHUNK), second.read(_CHUNK)
            if left != right or not left:
                return left == right


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on disk."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


_UNITS = {"": 1, "b": 1, **_DECIMAL, **_BINARY}  # in lower case


def parse_size(size: str | int | None) -> int | None:
    """Return a size in bytes, from a number or text with a unit; None stays None.

    >>> [parse_size(size) for size in ("2GB", "1.5 MiB", "500", 7, None)]
    [2000000000, 1572864, 500, 7, None]
    """
    if size is None:
        return None
    found = _SIZE.fullmatch(str(size))
    unit = _UNITS.get(found[2].lower()) if found else None
    count = int(float(found[1]) * unit) if found and unit else 0
    if count < 1:
        raise UsageError(
            f"`shard_size` is {str(size)!r}, expected a number of bytes, e.g. 2GB, 500MB or 1GiB"
        )
    return count


# A list without lists, objects or strings in it. Strings hold no raw newline, so none can match.
_SPREAD_LIST = re.compile(r"\[\n([^\[\]{}\"]*)\]")


def readable(record: Mapping[str, Any]) -> str:
    """Return a record as indented JSON, each list of numbers on one line.

    >>> print(readable({"seed": 0, "widths": [[1, 2], [3]]}), end="")
    {
     "seed": 0,
     "widths": [
      [1, 2],
      [3]
     ]
    }
    """
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    return _SPREAD_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def compact(content: Mapping[str, Any]) -> str:
    """Return JSON without any space."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
