"""Read safetensors files: the header at once, each tensor by its own read."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from fedmerge.checkpoint.files import Contents, ReadOptions, Region, SourceFile, damaged
from fedmerge.checkpoint.tensors import (
    StoredTensor,
    View,
    check_shape,
    stored,
    strided,
    torch_dtype,
)
from fedmerge.decoding import Fail, decode_json, decode_value
from fedmerge.errors import CheckpointError
from fedmerge.values.clients import TensorInfo

METADATA = "__metadata__"
_LENGTH = 8  # bytes that say how long the header is
LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
DTYPES = {  # the format's tag -> torch's name
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "BOOL": "bool",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
}


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_safetensors(file: SourceFile, options: ReadOptions) -> Contents:
    """Read the header of a safetensors file, in the header's order."""

    def fail(reason: str) -> CheckpointError:
        return damaged(file.path, reason)

    header, data = _header(file, fail)
    metadata = decode_value(header.pop(METADATA, {}), dict[str, str], fail=fail)
    try:
        file.budget.take_tensors(len(header))
        entries = decode_value(header, dict[str, _Entry], fail=fail)
        tree = {name: _tensor(data, entry) for name, entry in entries.items()}
        _check_gaps(entries, data.size)
    except ValueError as error:
        raise fail(str(error)) from error
    return Contents("safetensors", tree, (file,), metadata)


def _header(file: SourceFile, fail: Fail) -> tuple[dict[str, Any], Region]:
    """Return the header, and where the numbers lie."""
    length = int.from_bytes(file.whole.read(0, min(_LENGTH, file.size)), "little")
    begin = _LENGTH + length
    if begin > file.size or length > LARGEST_HEADER:
        raise fail(f"its header should have {length:,} bytes")
    header = decode_json(file.whole.read(_LENGTH, length), dict[str, Any], fail=fail)
    return header, file.whole.part(begin, file.size - begin)


def _tensor(data: Region, entry: _Entry) -> StoredTensor:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"a tensor has the bytes {begin:,} to {end:,} of {data.size:,}")
    name = DTYPES.get(entry.dtype, entry.dtype.lower())
    info = TensorInfo(entry.shape, name)
    if entry.dtype not in DTYPES:  # it cannot be merged, and its numbers' size is not known
        check_shape(entry.shape, 1)
        return stored(info, lambda: torch.empty(0))
    dtype = torch_dtype(name)
    check_shape(entry.shape, dtype.itemsize)
    if info.size * dtype.itemsize != end - begin:
        raise ValueError(f"a tensor of shape {entry.shape} has {end - begin:,} bytes")
    numbers = data.part(begin, end - begin)
    view = View.dense(entry.shape)
    return strided(lambda: numbers, dtype, view, held=end - begin, owner=None)


def _check_gaps(entries: Mapping[str, _Entry], size: int) -> None:
    """Refuse numbers that belong to no tensor, or to several."""
    place = 0
    for begin, end in sorted(entry.data_offsets for entry in entries.values()):
        if begin != place:
            raise ValueError(
                f"bytes {min(place, begin):,} to {max(place, begin):,} have no owner or two"
            )
        place = end
    if place != size:
        raise ValueError(f"its tensors end after {place:,} of {size:,} bytes")
