"""Send JSON and arrays through a byte stream: no pickles, each array copied once.

A message is the length of a JSON header (8 bytes, little-endian), the header, and then the bytes
of the arrays one after the other.
"""

from __future__ import annotations

import json
from typing import IO, Any

import numpy as np

from fedmerge.types.arrays import Array
from fedmerge.types.work import Arrays, JsonObject

_LENGTH = 8  # bytes


def send(stream: IO[bytes], message: JsonObject, arrays: Arrays) -> None:
    """Write one message and flush it."""
    contiguous = {name: np.require(array, requirements="C") for name, array in arrays.items()}
    entries = [[name, array.dtype.str, array.shape] for name, array in contiguous.items()]
    header = json.dumps({"message": dict(message), "arrays": entries}).encode()
    stream.write(len(header).to_bytes(_LENGTH, "little") + header)
    for array in contiguous.values():
        stream.write(_bytes_of(array))
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read one message; `EOFError` where the stream ends before it does."""
    length = int.from_bytes(_exactly(stream, _LENGTH), "little")
    header = json.loads(_exactly(stream, length))
    arrays: dict[str, Array] = {}
    for name, dtype, shape in header["arrays"]:
        arrays[name] = np.empty(shape, dtype)
        _fill(stream, _bytes_of(arrays[name]))
    return header["message"], arrays


def _bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array without copying them."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _exactly(stream: IO[bytes], count: int) -> bytes:
    content = bytearray(count)
    _fill(stream, memoryview(content))
    return bytes(content)


def _fill(stream: IO[bytes], target: memoryview) -> None:
    """Read until the target is full."""
    while len(target):
        count = stream.readinto(target)  # type: ignore[attr-defined]  # typeshed leaves it out
        if not count:
            raise EOFError("the stream ended inside a message")
        target = target[count:]
