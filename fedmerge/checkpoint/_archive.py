"""The zip archives that torch writes: their records, measured against the file."""

import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from fedmerge.checkpoint._failures import damaged, reason_of
from fedmerge.errors import CheckpointError

_RESAVE = "save it again with a current torch"
_ALIGNMENT = 64  # bytes, where torch lets every record begin
_LONGEST_TEXT = 64_000_000  # bytes of one record of text
_LOCAL_LENGTHS = 26  # where a record's own header says how long its name and extra field are
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, struct.error, EOFError, OSError),
    *(ValueError, NotImplementedError, OverflowError, RuntimeError),
)


@dataclass(frozen=True)
class Archive:
    """A zip file whose records are stored as they are, each once."""

    path: Path
    size: int  # bytes of the file
    entries: Mapping[str, zipfile.ZipInfo]  # by name
    _storages: dict[str, torch.UntypedStorage] = field(repr=False, default_factory=dict)

    def read(self, name: str) -> bytes:
        """Return a record's bytes whatever its checksum says: torch may be told to write none."""
        with self.path.open("rb") as file:
            file.seek(self._start(name))
            return file.read(self.entries[name].file_size)

    def text(self, name: str) -> str:
        """Return a record of text, which torch compresses if it is code."""
        with self.path.open("rb") as file:
            file.seek(self._start(name))
            content = file.read(self.entries[name].compress_size)
        if self.entries[name].compress_type == zipfile.ZIP_DEFLATED:
            try:
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, _LONGEST_TEXT)
            except zlib.error as error:
                raise damaged(self.path, f"its record '{name}': {reason_of(error)}") from error
        return content.decode("utf-8", "replace")

    def storage(self, name: str) -> torch.UntypedStorage:
        """Return a record's bytes as memory that maps the file; the same for the same record."""
        if name not in self._storages:
            self._storages[name] = self._map(name)
        return self._storages[name]

    def under(self, folder: str) -> list[str]:
        """Return the names of the records below a folder, without it."""
        return [name.removeprefix(folder) for name in self.entries if name.startswith(folder)]

    def _map(self, name: str) -> torch.UntypedStorage:
        start, length = self._start(name), self.entries[name].file_size
        if start % _ALIGNMENT:  # not written by torch: numbers may lie across their own size
            content = bytearray(self.read(name))
            return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
        whole = torch.UntypedStorage.from_file(str(self.path), False, self.size)
        part: torch.UntypedStorage = whole[start : start + length]
        return part

    def _start(self, name: str) -> int:
        with self.path.open("rb") as file:
            start = record_start(file, self.entries[name])
        if start + self.entries[name].compress_size > self.size:
            raise damaged(self.path, f"its record '{name}' ends beyond the file")
        return start


def record_start(stream: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Return where a record's bytes begin in its zip file."""
    stream.seek(entry.header_offset + _LOCAL_LENGTHS)
    of_name, of_extra = stream.read(2), stream.read(2)
    lengths = int.from_bytes(of_name, "little") + int.from_bytes(of_extra, "little")
    return stream.tell() + lengths


def open_archive(path: Path, *, compressed: str = "") -> Archive:
    """Read the directory of a zip file and refuse what its size contradicts.

    Only records with `compressed` in their names may be so (default: none).
    """
    with path.open("rb") as file:
        entries = checked_entries(path, file, path.stat().st_size, compressed=compressed)
    return Archive(path, path.stat().st_size, entries)


def record_names(path: Path) -> list[str]:
    """Return the names of a zip file's records."""
    with path.open("rb") as file:
        return [entry.filename for entry in _directory(path, file)]


def checked_entries(
    path: Path, stream: IO[bytes], size: int, *, compressed: str = ""
) -> Mapping[str, zipfile.ZipInfo]:
    """Return the records of a zip of `size` bytes by name, if it is one that torch could write."""
    entries = _directory(path, stream)
    twice = [name for name, count in Counter(e.filename for e in entries).items() if count > 1]
    if twice:
        raise damaged(path, f"it holds the record '{twice[0]}' more than once")
    for entry in entries:
        is_plain = entry.compress_type == zipfile.ZIP_STORED
        is_plain |= bool(compressed) and compressed in entry.filename
        if not is_plain or entry.flag_bits & 1:
            raise CheckpointError(
                f"{path}: its record '{entry.filename}' is compressed or encrypted, "
                "which torch never writes",
                _RESAVE,
            )
    if sum(_stored_size(entry) for entry in entries) > size:
        raise damaged(path, "its records claim more bytes than the file has")
    return {entry.filename: entry for entry in entries}


def _stored_size(entry: zipfile.ZipInfo) -> int:
    is_plain = entry.compress_type == zipfile.ZIP_STORED
    return max(entry.file_size, entry.compress_size) if is_plain else entry.compress_size


def _directory(path: Path, stream: IO[bytes]) -> Sequence[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(stream) as archive:
            return archive.infolist()
    except _ZIP_ERRORS as error:
        raise damaged(path, reason_of(error)) from error
