"""Files of strangers: opened once, read within a budget, also what lies in a zip archive."""

import hashlib
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from fedmerge.decoding import shortened
from fedmerge.errors import CheckpointError
from fedmerge.values.clients import Program
from fedmerge.values.option_fields import check_options, one_of

RESAVE = 'save only the tensors: `torch.save(model.state_dict(), "model.pt")`'


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


MOST_STEPS = 2_000_000  # of all pickles: fifty thousand tensors take as many
MOST_VALUES = 600_000  # lists, dictionaries and objects that pickles make; each fills 80 bytes
MOST_ITEMS = 2_000_000  # that functions are given by pickles, in all their arguments
MOST_TENSORS = 50_000
MOST_RECORDS = 200_000  # of all zip archives, also of those inside others
MOST_DIRECTORY = 64_000_000  # bytes of all their directories, whose names stay in memory


@dataclass
class Budget:
    """What is left for one checkpoint; all its files and the archives inside them share it."""

    steps: int = MOST_STEPS
    values: int = MOST_VALUES
    items: int = MOST_ITEMS
    tensors: int = MOST_TENSORS
    records: int = MOST_RECORDS
    directory: int = MOST_DIRECTORY

    def take_step(self) -> None:
        """Count an opcode of a pickle."""
        self.steps -= 1
        if self.steps < 0:
            raise ValueError(f"it has more than {MOST_STEPS:,} steps")

    def take_value(self) -> None:
        """Count a value that has room for others."""
        self.values -= 1
        if self.values < 0:
            raise ValueError(f"it makes more than {MOST_VALUES:,} lists and objects")

    def take_items(self, count: int) -> None:
        """Count what a function is given."""
        self.items -= count
        if self.items < 0:
            raise ValueError(f"its functions are given more than {MOST_ITEMS:,} values")

    def take_tensors(self, count: int = 1) -> None:
        """Count tensors."""
        self.tensors -= count
        if self.tensors < 0:
            raise ValueError(f"it has more than {MOST_TENSORS:,} tensors")

    def take_record(self) -> None:
        """Count an entry of an archive's directory."""
        self.records -= 1
        if self.records < 0:
            raise ValueError(f"it has more than {MOST_RECORDS:,} records")

    def take_directory(self, size: int) -> None:
        """Count the bytes of an archive's directory."""
        self.directory -= size
        if self.directory < 0:
            raise ValueError(f"its directories have more than {MOST_DIRECTORY:,} bytes")


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
    place: Path = field(repr=False, compare=False)  # its path, whatever the current folder is

    @staticmethod
    def of(path: Path, budget: Budget | None = None) -> "SourceFile":
        """Take note of a file, which may share its budget with others of the same checkpoint."""
        status = path.stat()
        size, identity = status.st_size, _identity(status)
        return SourceFile(path, size, identity, budget or Budget(), path.absolute())

    @property
    def whole(self) -> "Region":
        """All bytes of the file."""
        return Region(self, 0, self.size)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the file, which is the same file before and after."""
        handle = os.open(self.place, _FLAGS)
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


@dataclass(frozen=True)
class ReadOptions:
    """What to take from a container that holds more than one state dict, and whom to trust."""

    key: str | None = None  # dotted path of the state dict, e.g. "nets.G"; "." is the top level
    weights: Literal["raw", "ema"] | None = None  # None: raw if there, else the EMA copy
    allow_globals: tuple[str, ...] = ()  # "package.Class", whose objects are kept, inert

    def __post_init__(self) -> None:
        check_options(self, {"weights": one_of("raw", "ema")})


@dataclass(frozen=True)
class Contents:
    """A container's object tree; its leaves of interest are tensors, loaded or described."""

    container: str
    tree: object
    files: tuple[SourceFile, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, Program] = field(default_factory=dict)  # by their weights' location

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


STORED, DEFLATED = 0, 8  # methods of compression

_END = struct.Struct("<4s4H2LH")  # signature, disks, counts, size and place of the directory
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")  # of the above, where sizes need 8 bytes
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LONGEST_COMMENT = (1 << 16) - 1
_WIDE = (1 << 32) - 1  # in place of a size that stands in the extra field
_ZIP64 = 1  # the extra field's kind
_ENCRYPTED = 1  # a flag
_OUTSIDE = "lies beyond the file or has no header"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the directory says of one record."""

    name: str
    method: int
    is_encrypted: bool
    crc: int
    stored_size: int  # bytes in the file
    size: int  # bytes of content
    header: int  # where its own header begins


def read_directory(archive: Region) -> list[Entry]:
    """Return the records of a zip file in the directory's order."""
    try:
        begin, size = _directory_place(archive)
        archive.file.budget.take_directory(size)
        return _entries(archive.read(begin, size), archive.file.budget)
    except (struct.error, ValueError) as error:
        raise _damaged(archive, str(error) or "it is no zip file") from error


def content_region(archive: Region, entry: Entry) -> Region:
    """Return where a record's bytes lie."""
    try:
        signature, *_, name, extra = _LOCAL.unpack(archive.read(entry.header, _LOCAL.size))
        if signature != b"PK\x03\x04":
            raise ValueError(_OUTSIDE)
        start = entry.header + _LOCAL.size + name + extra
        crc = entry.crc if entry.method == STORED else 0  # a checksum is of the content
        return archive.part(start, entry.stored_size, crc)
    except ValueError as error:
        raise _damaged(archive, f"its record '{entry.name}' {_OUTSIDE}") from error


def _directory_place(archive: Region) -> tuple[int, int]:
    """Return where the directory begins, and its size."""
    tail_start = max(0, archive.size - _END.size - _LONGEST_COMMENT)
    tail = archive.read(tail_start)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + _END.size > len(tail):
        raise ValueError("its end is missing")
    *_, size, begin, _ = _END.unpack_from(tail, place)
    end = tail_start + place
    if begin == _WIDE or size == _WIDE:
        begin, size, end = _wide_place(archive, end)
    if begin + size > end:
        raise ValueError("its directory lies beyond its end")
    return begin, size


def _wide_place(archive: Region, end: int) -> tuple[int, int, int]:
    signature, _, place, _ = _LOCATOR.unpack(archive.read(end - _LOCATOR.size, _LOCATOR.size))
    if signature != b"PK\x06\x07" or place + _END_64.size > end:
        raise ValueError("its end is damaged")
    signature, *_, size, begin = _END_64.unpack(archive.read(place, _END_64.size))
    if signature != b"PK\x06\x06":
        raise ValueError("its end is damaged")
    return begin, size, place


def _entries(directory: bytes, budget: Budget) -> list[Entry]:
    entries: list[Entry] = []
    place = 0
    while place < len(directory):
        budget.take_record()
        fields = _ENTRY.unpack_from(directory, place)
        signature, flags, method, crc, stored, size = (fields[i] for i in (0, 3, 4, 7, 8, 9))
        name_length, extra_length, comment_length, header = (fields[i] for i in (10, 11, 12, 16))
        if signature != b"PK\x01\x02":
            raise ValueError("its directory is damaged")
        place += _ENTRY.size
        name = directory[place : place + name_length].decode("utf-8", "replace")
        extra = directory[place + name_length : place + name_length + extra_length]
        size, stored, header = _wide_sizes(extra, size, stored, header)
        entries.append(Entry(name, method, bool(flags & _ENCRYPTED), crc, stored, size, header))
        place += name_length + extra_length + comment_length
    return entries


def _wide_sizes(extra: bytes, *sizes: int) -> tuple[int, ...]:
    """Return sizes with those of 8 bytes, which stand in the extra field, in their places."""
    if _WIDE not in sizes:
        return sizes
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        place += 4
        if kind == _ZIP64:
            count = sizes.count(_WIDE)
            wide = iter(struct.unpack_from(f"<{count}Q", extra, place))
            return tuple(next(wide) if size == _WIDE else size for size in sizes)
        place += length
    return sizes


def _damaged(archive: Region, reason: str) -> CheckpointError:
    return damaged(archive.file.path, reason)


_RESAVE = "save it again with a current torch"


@dataclass(frozen=True)
class Archive:
    """A zip file, or one inside another, whose records are stored as they are, each once."""

    region: Region
    entries: Mapping[str, Entry]  # by name
    _contents: dict[str, Region] = field(repr=False, default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.region.file.path

    def content(self, name: str) -> Region:
        """Return where a record's bytes lie, always the same region, so that it is checked once."""
        if name not in self.entries:
            raise damaged(self.path, f"its record '{name}' is missing")
        if name not in self._contents:
            self._contents[name] = content_region(self.region, self.entries[name])
        return self._contents[name]

    def read(self, name: str) -> bytes:
        """Return a record's bytes, which must agree with their checksum."""
        region = self.content(name)
        content = region.read()
        region.check(memoryview(content))
        return content

    def text(self, name: str, most: int) -> str:
        """Return at most so many bytes of a text; torch compresses code."""
        content = self.content(name).read()
        if self.entries[name].method == DEFLATED:
            try:
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, most)
            except zlib.error as error:
                raise damaged(self.path, f"its record '{name}': {reason_of(error)}") from error
        return content[:most].decode("utf-8", "replace")

    def under(self, folder: str) -> list[str]:
        """Return the names of the records below a folder, without it."""
        return [name.removeprefix(folder) for name in self.entries if name.startswith(folder)]


def open_archive(region: Region, *, compressed: str = "") -> Archive:
    """Read the directory of a zip file and refuse what its size contradicts.

    Only records with `compressed` in their names may be so (default: none).
    """
    path, entries = region.file.path, read_directory(region)
    twice = [name for name, count in Counter(e.name for e in entries).items() if count > 1]
    if twice:
        raise damaged(path, f"it holds the record '{twice[0]}' more than once")
    for entry in entries:
        is_plain = entry.method == STORED and entry.stored_size == entry.size
        is_plain |= bool(compressed) and compressed in entry.name and entry.method == DEFLATED
        if not is_plain or entry.is_encrypted:
            raise CheckpointError(
                f"{path}: its record '{shortened(entry.name)}' is compressed or encrypted, "
                "which torch never writes",
                _RESAVE,
            )
    if sum(entry.stored_size for entry in entries) > region.size:
        raise damaged(path, "its records claim more bytes than the file has")
    return Archive(region, {entry.name: entry for entry in entries})
