"""Arrays in `.npy` and `.npz` files, read in parts where they are large."""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedmerge.checkpoint.files import (
    DEFLATED,
    STORED,
    Entry,
    Region,
    SourceFile,
    content_region,
    damaged,
    read_directory,
    reason_of,
    unreadable,
)
from fedmerge.checkpoint.tensors import check_shape
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from fedmerge.values.arrays import Array, IntArray

LONGEST_HEADER = 10_000  # bytes, numpy's own limit
_READ_WHOLE = 64_000_000  # bytes of an array up to which it is read at once
_MAGIC = b"\x93NUMPY"
_LENGTHS = {
    b"\1": 2,
    b"\2": 4,
    b"\3": 4,
}  # the format's version → bytes that say how long the header is
# One of three entries of a dictionary, as numpy and others write them; Python 2 wrote 10L.
_ENTRY = re.compile(
    r"""\s*(?P<q>['"])(?P<key>descr|fortran_order|shape)(?P=q)\s*:\s*"""
    r"""(?:(?P<r>['"])(?P<descr>[^'"]*)(?P=r)|(?P<flag>True|False)|\((?P<shape>[0-9L,\s]*)\))"""
    r"""\s*(?:,|$)"""
)
_DTYPE = re.compile(r"[<>|=]?[?biufcSU][0-9]{0,9}")  # numbers and texts, no objects
_OBJECTS = re.compile(r"""['"|]O[0-9]*['"]""")
_UNSAFE_HINT = "store plain numbers: np.savez(path, x=x, y=y) or torch.save({'x': x, 'y': y}, path)"


@dataclass(frozen=True)
class NpyHeader:
    """What an array claims to be, and where its numbers begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        """How many bytes its numbers fill."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, content: Array) -> Array:
        """Return bytes (nbytes,) as the array, without copying them."""
        shape = self.shape[::-1] if self.is_fortran else self.shape
        array: Array = np.ndarray(shape, self.dtype, content.data)
        return array.T if self.is_fortran else array


@dataclass(frozen=True, eq=False)
class StoredRows:
    """An array in a file, of which rows are read when they are asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _content: Region

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | IntArray) -> Array:
        """Return some rows as an array in memory; those that follow each other by one read."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(self)}")
        found: Array = np.empty((len(rows), *self.shape[1:]), self.dtype)
        if not found.size:
            return found
        content = found.reshape(len(rows), -1).view(np.uint8)
        starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for start, stop in pairwise(starts):
            offset = int(rows[start]) * content.shape[1]
            self._content.read_into(content[start:stop].reshape(-1).data, offset)
        return found


Rows: TypeAlias = Array | StoredRows


def in_memory(rows: Rows) -> Array:
    """Return all rows of an array."""
    return rows[:] if isinstance(rows, StoredRows) else rows


def read_npy(path: Path) -> Array:
    """Return the array of an `.npy` file."""
    try:
        file = SourceFile.of(path)
        header = npy_header(path, file.whole.read(0, min(LONGEST_HEADER, file.size)))
        if header.start + header.nbytes != file.size:
            raise wrong_size(path, header, file.size)
        content = empty_bytes(path, header.nbytes)
        file.whole.read_into(content.data, header.start)
    except OSError as error:
        raise unreadable(path, error) from error
    return header.array(content)


def npy_header(label: str | Path, content: bytes) -> NpyHeader:
    """Return what the first bytes of an array say; `label` names it in errors."""
    width = _LENGTHS.get(content[len(_MAGIC) : len(_MAGIC) + 1])
    if not content.startswith(_MAGIC) or width is None:
        raise damaged(label, "no array as numpy writes it")
    begin = len(_MAGIC) + 2 + width
    length = int.from_bytes(content[begin - width : begin], "little")
    if length > LONGEST_HEADER - begin or begin + length > len(content):
        raise damaged(label, f"its header should have {length:,} bytes")
    text = content[begin : begin + length].decode("latin-1").strip()
    entries = _entries(label, text)
    dtype = _dtype(label, entries["descr"])
    try:
        shape = tuple(int(n.rstrip("L")) for n in entries["shape"].replace(",", " ").split())
        check_shape(shape, dtype.itemsize)
    except ValueError as error:
        raise damaged(label, str(error)) from error
    return NpyHeader(shape, dtype, entries["fortran_order"] == "True", begin + length)


def stored_rows(header: NpyHeader, content: Region) -> StoredRows | None:
    """Return an array whose rows are read one by one, None if it is better read at once."""
    if header.is_fortran or not header.shape or header.nbytes <= _READ_WHOLE:
        return None
    return StoredRows(header.shape, header.dtype, content)


def empty_bytes(label: str | Path, count: int) -> Array:
    """Return memory for an array's bytes."""
    try:
        return np.empty(count, np.uint8)
    except MemoryError as error:
        raise CheckpointError(f"{label}: its {count:,} bytes don't fit into memory") from error


def wrong_size(label: str | Path, header: NpyHeader, size: int) -> CheckpointError:
    """Return the error of an array whose header claims another size than it has."""
    claimed = f"{header.shape} of {header.dtype}"
    return damaged(label, f"{size - header.start:,} bytes, too few or many for {claimed}")


def _entries(label: str | Path, text: str) -> dict[str, str]:
    """Return the three entries of a header as text: nothing of it is evaluated."""
    if _OBJECTS.search(text):
        raise UnsafeCheckpointError(
            f"{label}: refused, it holds Python objects, which can run code when loaded",
            _UNSAFE_HINT,
        )
    found: dict[str, str] = {}
    inner, place = text[1:-1].strip(), 0
    while place < len(inner) and (entry := _ENTRY.match(inner, place)):
        value = entry["flag"] if entry["descr"] is None else entry["descr"]
        found[entry["key"]] = entry["shape"] if value is None else value
        place = entry.end()
    is_whole = text[:1] == "{" and text[-1:] == "}" and place == len(inner)
    if not is_whole or found.keys() != {"descr", "fortran_order", "shape"}:
        raise damaged(label, "its header is not that of numbers or texts")
    return found


def _dtype(label: str | Path, code: str) -> np.dtype[Any]:
    try:
        if not _DTYPE.fullmatch(code):
            raise TypeError
        dtype: np.dtype[Any] = np.dtype(code)
    except (TypeError, ValueError) as error:
        raise damaged(label, f"its numbers have the unknown type {code[:20]!r}") from error
    if not dtype.itemsize:
        raise damaged(label, f"its values have the type {code!r}, which fills nothing")
    return dtype


# What a file may inflate to. Deflate makes up to a thousand bytes of one, so a small file could
# ask for any memory; real data are seldom six times smaller than their numbers, unless they are
# small. Uncompressed files have no limit: their rows are read when they are needed.
LARGEST_INFLATED = 200_000_000  # bytes, and …
MOST_INFLATED = 6  # … so many times the file's own
_STRONGEST = 1032  # bytes that deflate can make of one
_CHUNK = 1 << 20
_SUFFIX = ".npy"
_checked: set[tuple[object, ...]] = set()  # contents whose checksums were right


def open_npz(path: Path) -> Mapping[str, Callable[[], Rows]]:
    """Return the arrays of a file by name, each read when it is called."""
    try:
        file = SourceFile.of(path)
        entries = [e for e in read_directory(file.whole) if e.name.endswith(_SUFFIX)]
    except OSError as error:
        raise unreadable(path, error) from error
    _check_inflation(file, entries)
    arrays: dict[str, Callable[[], Rows]] = {}
    for entry in entries:
        name = entry.name.removesuffix(_SUFFIX)
        if name in arrays:
            raise damaged(path, f"it holds '{name}' more than once")
        arrays[name] = partial(_read, _Member(file, entry))
    return arrays


def _check_inflation(file: SourceFile, entries: list[Entry]) -> None:
    """Refuse a file that claims to hold far more than its size."""
    inflated = sum(entry.size for entry in entries if entry.method != STORED)
    most = LARGEST_INFLATED + MOST_INFLATED * file.size
    if inflated > most:
        raise CheckpointError(
            f"{file.path}: its compressed arrays would fill {inflated:,} bytes, of a file of "
            f"{file.size:,} at most {most:,} are read",
            "if you trust it, store its arrays uncompressed: np.savez(path, **np.load(old))",
        )


@dataclass(frozen=True)
class _Member:
    """An array among others in a file."""

    file: SourceFile
    entry: Entry

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.file.path}: '{self.entry.name.removesuffix(_SUFFIX)}'"

    def content(self) -> Region:
        """Return where its bytes lie, which are as many as its directory can mean."""
        entry = self.entry
        if entry.is_encrypted or entry.method not in (STORED, DEFLATED):
            raise CheckpointError(
                f"{self.label} is encrypted, or compressed as numpy never does it",
                "write it with np.savez or np.savez_compressed",
            )
        is_stored = entry.method == STORED
        if entry.size > (1 if is_stored else _STRONGEST) * entry.stored_size:
            raise damaged(self.label, f"{entry.size:,} bytes out of {entry.stored_size:,}")
        return content_region(self.file.whole, entry)

    def header(self, content: Region) -> NpyHeader:
        """Return what the array claims to be; its sizes agree with the directory's."""
        first = content.read(0, min(content.size, 2 * LONGEST_HEADER))
        if self.entry.method == DEFLATED:
            first = zlib.decompressobj(-zlib.MAX_WBITS).decompress(first, LONGEST_HEADER)
        header = npy_header(self.label, first)
        if header.start + header.nbytes != self.entry.size:
            raise wrong_size(self.label, header, self.entry.size)
        return header


def _read(member: _Member) -> Rows:
    """Return an array, or what reads its rows; its bytes agree with their checksum."""
    try:
        content = member.content()
        header = member.header(content)
        rows = stored_rows(header, _numbers(content, header)) if _is_plain(member) else None
        if rows is None:
            return header.array(_whole(member, content, header))
        _check_once(member, content)
    except OSError as error:
        raise unreadable(member.label, error) from error
    except (zlib.error, EOFError) as error:
        raise damaged(member.label, reason_of(error)) from error
    return rows


def _is_plain(member: _Member) -> bool:
    return member.entry.method == STORED


def _numbers(content: Region, header: NpyHeader) -> Region:
    return content.part(header.start, header.nbytes)


def _whole(member: _Member, content: Region, header: NpyHeader) -> Array:
    """Return the bytes of an array, read or inflated into memory of the size it claims."""
    target = empty_bytes(member.label, header.nbytes)
    place = -header.start
    for chunk in _checked_chunks(member, content):
        skipped = max(0, -place)
        part = memoryview(chunk)[skipped:]
        if place + len(chunk) > header.nbytes:
            raise EOFError("it is longer than its directory says")
        if part:
            target.data[place + skipped : place + len(chunk)] = part
        place += len(chunk)
    if place != header.nbytes:
        raise EOFError("it is shorter than its directory says")
    return target


def _check_once(member: _Member, content: Region) -> None:
    """Compare the bytes with their checksum, if this process has not done so before."""
    key = (member.file, member.entry)
    if key not in _checked:
        for _ in _checked_chunks(member, content):
            pass
        _checked.add(key)


def _checked_chunks(member: _Member, content: Region) -> Iterator[bytes]:
    """Yield an array's bytes, some at a time; the last only if the checksum is theirs."""
    crc, last = 0, b""
    for chunk in content.chunks() if _is_plain(member) else _inflated(content):
        yield last
        crc, last = zlib.crc32(chunk, crc), chunk
    if crc != member.entry.crc:
        raise EOFError("its bytes contradict their checksum")
    yield last


def _inflated(content: Region) -> Iterator[bytes]:
    """Yield what compressed bytes stand for, a bounded part at a time."""
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    for chunk in content.chunks():
        while chunk and not inflate.eof:
            yield inflate.decompress(chunk, _CHUNK)
            chunk = inflate.unconsumed_tail
    while not inflate.eof and (rest := inflate.decompress(b"", _CHUNK)):
        yield rest
    if not inflate.eof:
        raise EOFError("its compressed bytes end too early")
