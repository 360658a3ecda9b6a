"""Bytes of files that must stay as they were when they were opened.

Nothing is memory-mapped: a file that shrinks would end the process, and pages of tensors that are
no longer needed would stay resident.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from fedmerge.checkpoint._budget import Budget
from fedmerge.checkpoint._failures import damaged
from fedmerge.errors import CheckpointError

_CHUNK = 1 << 20  # bytes read at once where a file is only looked through
_NO_CHECKSUM = 0  # in place of one that the writer was told not to compute
# Should a pipe have taken the file's place, nobody waits for its writer.
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_Identity: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was opened; read later, it must still be the same."""

    path: Path
    size: int  # bytes
    identity: _Identity = field(repr=False)
    budget: Budget = field(repr=False, compare=False)  # what reading it may cost

    @staticmethod
    def of(path: Path, budget: Budget | None = None) -> "SourceFile":
        """Take note of a file, which may share its budget with others of the same checkpoint."""
        status = path.stat()
        return SourceFile(path, status.st_size, _identity(status), budget or Budget())

    @property
    def whole(self) -> "Region":
        """All bytes of the file."""
        return Region(self, 0, self.size)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the file, which is the same file before and after."""
        handle = os.open(self.path, _FLAGS)
        try:
            self._check(handle)
            yield handle
            self._check(handle)
        finally:
            os.close(handle)

    def sha256(self) -> str:
        """Return the SHA-256 of all bytes."""
        content = hashlib.sha256()
        for chunk in self.whole.chunks():
            content.update(chunk)
        return content.hexdigest()

    def _check(self, handle: int) -> None:
        if _identity(os.fstat(handle)) != self.identity:
            raise self.changed()

    def changed(self) -> CheckpointError:
        """Return the error of a file that somebody writes to."""
        return CheckpointError(
            f"{self.path}: changed while it was being read",
            "wait until whoever writes it has finished, then run this again",
        )


@dataclass(frozen=True, eq=False)
class Region:
    """Some bytes of a file, which may have a checksum of their own."""

    file: SourceFile
    start: int
    size: int
    crc: int = _NO_CHECKSUM
    _checked: list[bool] = field(default_factory=list, repr=False)  # not empty: it was right

    def part(self, start: int, size: int, crc: int = _NO_CHECKSUM) -> "Region":
        """Return bytes from within these."""
        self._check_bounds(start, size)
        return Region(self.file, self.start + start, size, crc)

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Return bytes as they are, whatever the checksum says."""
        size = self.size - offset if size is None else size
        self._check_bounds(offset, size)
        content = bytearray(size)
        self.read_into(memoryview(content), offset)
        return bytes(content)

    def read_into(self, target: memoryview, offset: int = 0) -> None:
        """Fill memory with the bytes from an offset on."""
        self._check_bounds(offset, target.nbytes)
        with self.file.opened() as handle:
            _fill(self.file, handle, target, self.start + offset)

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes, some at a time."""
        with self.file.opened() as handle:
            for begin in range(0, self.size, _CHUNK):
                content = bytearray(min(_CHUNK, self.size - begin))
                _fill(self.file, handle, memoryview(content), self.start + begin)
                yield bytes(content)

    def _check_bounds(self, start: int, size: int) -> None:
        if not 0 <= start <= start + size <= self.size:
            raise ValueError(f"bytes {start:,} to {start + size:,} of {self.size:,} are asked for")

    def check(self, content: memoryview | None = None) -> None:
        """Refuse bytes that contradict their checksum; `content`: all of them, if read already."""
        if self.crc == _NO_CHECKSUM or self._checked:
            return
        found = 0
        for chunk in self.chunks() if content is None else [content]:
            found = zlib.crc32(chunk, found)
        if found != self.crc:
            raise damaged(self.file.path, "its bytes contradict their checksum")
        self._checked.append(True)


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _fill(file: SourceFile, handle: int, target: memoryview, offset: int) -> None:
    os.lseek(handle, offset, os.SEEK_SET)
    with open(handle, "rb", buffering=0, closefd=False) as stream:
        done = 0
        while done < target.nbytes:  # one call reads at most 2 GiB
            count = stream.readinto(target[done:])
            if not count:
                raise file.changed()
            done += count
