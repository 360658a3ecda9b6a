"""The directory of a zip file, with a budget: every record's name, sizes and place."""

import struct
from dataclasses import dataclass

from fedmerge.checkpoint._budget import Budget
from fedmerge.checkpoint._failures import damaged
from fedmerge.checkpoint._files import Region
from fedmerge.errors import CheckpointError

STORED, DEFLATED = 0, 8  # methods of compression

_LARGEST_DIRECTORY = 64_000_000  # bytes
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
        if size > _LARGEST_DIRECTORY:
            raise ValueError(f"its directory has {size:,} bytes")
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
