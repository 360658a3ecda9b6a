"""Read safetensors files: the header at once, each tensor by its own read."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._failures import damaged, reason_of
from fedmerge.checkpoint._tensors import StoredTensor, read_part, stored, torch_dtype
from fedmerge.types.clients import TensorInfo

METADATA = "__metadata__"
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


def read_safetensors(path: Path, options: ReadOptions) -> Contents:
    """Read the header of a safetensors file, in the header's order."""
    try:
        # The reference implementation checks offsets, sizes and gaps. Values are read without its
        # memory map, so that pages of tensors no longer needed don't stay resident.
        with safe_open(path, framework="numpy"):
            pass
        header, start = _header(path)
        metadata = {str(k): str(v) for k, v in header.pop(METADATA, {}).items()}
        tree = {name: _entry(path, start, entry) for name, entry in header.items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise damaged(path, reason_of(e)) from e
    return Contents("safetensors", tree, (path,), path.stat().st_size, metadata)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def _entry(path: Path, start: int, entry: dict[str, Any]) -> StoredTensor:
    tag, begin = str(entry["dtype"]), int(entry["data_offsets"][0])
    info = TensorInfo(tuple(int(n) for n in entry["shape"]), DTYPES.get(tag, tag.lower()))
    return stored(info, lambda: read_part(path, start + begin, info.shape, torch_dtype(info.dtype)))
