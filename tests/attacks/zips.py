"""Zip archives that lie about their records."""

from __future__ import annotations

import struct
from pathlib import Path

from tests.attacks.attack import add, attack
from tests.attacks.building import (
    Record,
    lying_zip,
    state_dict,
    tensor,
    torch_zip,
    write_zip,
)

_PICKLE = Record(b"a/data.pkl", state_dict(("fc.weight", tensor())))
_NUMBERS = Record(b"a/data/0", struct.pack("<4f", 1, 2, 3, 4))


def wide(*sizes: int) -> bytes:
    """Return an extra field with sizes of 8 bytes."""
    return struct.pack(f"<2H{len(sizes)}Q", 1, 8 * len(sizes), *sizes)


LIES: dict[str, list[Record]] = {
    "claims four gigabytes": [_PICKLE, Record(b"a/data/0", b"abcd", claimed=0xFFFFFFF0)],
    "claims more in 8 bytes": [
        _PICKLE,
        Record(b"a/data/0", b"abcd", claimed=0xFFFFFFFF, extra=wide(1 << 62, 1 << 62, 0)),
    ],
    "has no room for its 8 bytes": [
        _PICKLE,
        Record(b"a/data/0", b"abcd", claimed=0xFFFFFFFF, extra=b"\1\0\4\0abcd"),
    ],
    "has a header beyond the file": [_PICKLE, Record(b"a/data/0", claimed=16, at=1 << 31)],
    "has its header in another one": [_PICKLE, Record(b"a/data/0", claimed=16, at=7)],
    "overlaps another one": [_PICKLE, Record(b"a/data/0", claimed=16, at=0)],
    "is there twice": [_PICKLE, _NUMBERS, _NUMBERS],
    "is encrypted": [_PICKLE, Record(b"a/data/0", b"x" * 16, flags=1)],
    "is compressed": [_PICKLE, Record(b"a/data/0", b"x" * 16, method=8)],
    "has an unknown method": [_PICKLE, Record(b"a/data/0", b"x" * 16, method=99)],
    "has another checksum": [_PICKLE, Record(b"a/data/0", b"\0" * 16, crc=7)],
    "is a pickle of another checksum": [Record(_PICKLE.name, _PICKLE.content, crc=7), _NUMBERS],
    "is called by escapes": [_PICKLE, _NUMBERS, Record(b"a/\x1b[2J\x07"), Record(b"a/\x1b[2J\x07")],
    "is called by a very long name": [_PICKLE, _NUMBERS, *[Record(b"a/" + b"n" * 65_000)] * 2],
    "is called by no text": [_PICKLE, _NUMBERS, Record(b"\xff\xfe\0")],
    "is called by nothing": [_PICKLE, _NUMBERS, Record(b"")],
    "would lie outside": [_PICKLE, _NUMBERS, Record(b"../../canary"), Record(b"/etc/passwd")],
    "is a second pickle": [_PICKLE, _NUMBERS, Record(b"b/data.pkl", _PICKLE.content)],
    "makes it another kind": [
        _PICKLE,
        _NUMBERS,
        Record(b"a/constants.pkl"),
        Record(b"archive_format"),
    ],
    "makes it a program": [_PICKLE, _NUMBERS, Record(b"a/archive_format", b"pt2")],
    "makes it an old program": [
        _PICKLE,
        _NUMBERS,
        Record(b"serialized_exported_program.json", b"{}"),
    ],
    "makes it a big-endian one": [_PICKLE, _NUMBERS, Record(b"a/byteorder", b"big\x1b[2J")],
}
for _name, _records in LIES.items():
    add(f"a record that {_name}", lambda f, r=_records: _lying(f, r), 0, 1, 4)


def _lying(folder: Path, records: list[Record], **ends: int) -> str:
    lying_zip(folder / "a.pt", records, **ends)
    return "inspect a.pt"


@attack(0, 1)
def a_directory_that_claims_to_be_large(folder: Path) -> str:
    """Claim a directory of four gigabytes."""
    return _lying(folder, [_PICKLE, _NUMBERS], size=0xFFFFFFF0)


@attack(0, 1)
def a_directory_of_other_length(folder: Path) -> str:
    """Claim sixty thousand records where two are."""
    return _lying(folder, [_PICKLE, _NUMBERS], count=60_000)


@attack(0, 1)
def many_records(folder: Path) -> str:
    """Give as many records as are allowed."""
    records = [Record(b"a/data/%d" % k, at=0) for k in range(1, 199_000)]
    return _lying(folder, [_PICKLE, _NUMBERS, *records])


@attack(1)
def too_many_records(folder: Path) -> str:
    """Give a directory of more records than are allowed."""
    records = [Record(b"%d" % k, at=0) for k in range(220_000)]
    return _lying(folder, [_PICKLE, _NUMBERS, *records])


@attack(0, 1)
def records_with_very_long_names(folder: Path) -> str:
    """Give nine hundred names of 64 kB, each of characters that take four bytes in memory."""
    name = ("n" * 65_000 + "\U0001f600").encode()
    records = [Record(b"%d" % k + name, at=0) for k in range(900)]
    return _lying(folder, [_PICKLE, _NUMBERS, *records])


@attack(0, 1)
def ends_without_end(folder: Path) -> str:
    """Give a comment that is full of other ends."""
    path = torch_zip(folder / "a.pt", _PICKLE.content)
    path.write_bytes(path.read_bytes() + b"PK\5\6" * 16_000)
    return "inspect a.pt"


@attack(1)
def nothing_but_an_end(folder: Path) -> str:
    """Give an empty archive."""
    lying_zip(folder / "a.pt", [])
    return "inspect a.pt"


@attack(1)
def an_archive_of_arrays(folder: Path) -> str:
    """Give numpy's archive where a checkpoint is expected."""
    write_zip(folder / "a.pt", {"x.npy": b"\x93NUMPY", "y.npy": b""})
    return "inspect a.pt"


@attack(0, 1)
def bytes_before_and_after(folder: Path) -> str:
    """Put other bytes before and after an archive."""
    path = torch_zip(folder / "a.pt", _PICKLE.content)
    path.write_bytes(b"PK\3\4" + path.read_bytes() + b"\0" * 70_000)
    return "inspect a.pt"
