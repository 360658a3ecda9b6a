"""Arrays in `.npz` files: judged by their headers first, read within bounds, never unpickled."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedmerge.checkpoint._failures import damaged, reason_of, unreadable
from fedmerge.checkpoint._files import Region, SourceFile
from fedmerge.checkpoint._npy import (
    LONGEST_HEADER,
    NpyHeader,
    Rows,
    empty_bytes,
    npy_header,
    stored_rows,
    wrong_size,
)
from fedmerge.checkpoint._zip import DEFLATED, STORED, Entry, content_region, read_directory
from fedmerge.errors import CheckpointError
from fedmerge.types.arrays import Array

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
