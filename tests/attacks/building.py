"""Containers written by hand, so that anything in them can be wrong."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROTOCOL_2 = b"\x80\x02"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
MAKE_CANARY = b"cos\nmkdir\n" + b"X\x06\x00\x00\x00canary\x85R"  # os.mkdir("canary")
LOCAL_HEADER = 30
ENTRY = 46


def text(content: str) -> bytes:
    """Return the opcodes that push a string."""
    encoded = content.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    """Return the opcodes that push a number."""
    encoded = pickle.encode_long(value)
    return b"\x8b" + struct.pack("<I", len(encoded)) + encoded


def numbers(values: Iterable[int]) -> bytes:
    """Return the opcodes that push a tuple of numbers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str = "0", count: int = 4, kind: str = "FloatStorage") -> bytes:
    """Return the opcodes that push a storage."""
    parts = (text("storage"), f"ctorch\n{kind}\n".encode(), text(key), text("cpu"), number(count))
    return b"(" + b"".join(parts) + b"tQ"


def tensor(
    size: Sequence[int] = (4,),
    stride: Sequence[int] = (1,),
    *,
    offset: int = 0,
    held: bytes = b"",
) -> bytes:
    """Return the opcodes that make a tensor; `held`: those of its storage."""
    place = number(offset) + numbers(size) + numbers(stride)
    return REBUILD + b"(" + (held or storage()) + place + b"\x89ccollections\nOrderedDict\n)RtR"


def state_dict(*entries: tuple[str, bytes]) -> bytes:
    """Return a pickle of a dictionary from names and the opcodes of its values."""
    return PROTOCOL_2 + b"}" + b"".join(text(n) + value + b"s" for n, value in entries) + b"."


def torch_zip(
    path: Path, pickled: bytes, records: Mapping[str, bytes] | None = None, root: str = "a"
) -> Path:
    """Write an archive as `torch.save` does, with one storage of four numbers."""
    records = {"data/0": struct.pack("<4f", 1, 2, 3, 4)} if records is None else records
    content = {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **records}
    return write_zip(path, {f"{root}/{name}": record for name, record in content.items()})


def write_zip(path: Path, records: Mapping[str, bytes], *, deflated: str = "no record") -> Path:
    """Write a plain zip file; records with `deflated` in their names are compressed."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in records.items():
            method = zipfile.ZIP_DEFLATED if deflated in name else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), record, method)
    return path


def legacy(
    path: Path, tree: bytes, keys: bytes, counts: Iterable[int] = (), data: bytes = b""
) -> Path:
    """Write a file as `torch.save` did before 1.6; `counts` stand before the numbers."""
    head = [
        pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    ]
    sizes = b"".join(struct.pack("<Q", count) for count in counts)
    path.write_bytes(b"".join(head) + tree + keys + sizes + data)
    return path


def legacy_storage(key: str, count: int, view: bytes = b"N") -> bytes:
    """Return the opcodes that push a storage of a legacy file."""
    parts = (text("storage"), b"ctorch\nFloatStorage\n", text(key), text("cpu"), number(count))
    return b"(" + b"".join(parts) + view + b"tQ"


def safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a safetensors file; a header of bytes is written as it is."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def entry(shape: Sequence[int], offsets: Sequence[int], dtype: str = "F32") -> dict[str, Any]:
    """Return what a safetensors header says of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@dataclass(frozen=True)
class Record:
    """One record of a zip file that may lie about itself."""

    name: bytes
    content: bytes = b""
    claimed: int | None = None  # bytes, if not those of the content
    method: int = 0
    flags: int = 0
    crc: int | None = None
    at: int | None = None  # where its header is said to be
    extra: bytes = b""


def lying_zip(
    path: Path, records: Sequence[Record], *, count: int | None = None, size: int | None = None
) -> Path:
    """Write a zip file whose directory says what the records say."""
    body, directory = bytearray(), bytearray()
    for record in records:
        claimed = len(record.content) if record.claimed is None else record.claimed
        crc = zlib.crc32(record.content) if record.crc is None else record.crc
        place = len(body) if record.at is None else record.at
        if record.at is None:
            lengths = (len(record.name), 0)
            body += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, crc, 0, 0, *lengths)
            body += record.name + record.content
        directory += struct.pack(
            "<4s6H3L5H2L",
            *(b"PK\1\2", 20, 20, record.flags, record.method, 0, 0, crc),
            *(claimed & 0xFFFFFFFF, claimed & 0xFFFFFFFF, len(record.name), len(record.extra)),
            *(0, 0, 0, 0, place & 0xFFFFFFFF),
        )
        directory += record.name + record.extra
    told = min(len(records) if count is None else count, 0xFFFF)
    told_size = len(directory) if size is None else size
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, told, told, told_size, len(body), 0)
    path.write_bytes(bytes(body + directory) + end)
    return path
