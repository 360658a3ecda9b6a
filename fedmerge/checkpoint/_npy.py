"""Arrays as numpy writes them: headers are judged before memory is asked for numbers."""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedmerge.checkpoint._failures import damaged, unreadable
from fedmerge.checkpoint._files import Region, SourceFile
from fedmerge.checkpoint._tensors import check_shape
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from fedmerge.types.arrays import Array, IntArray

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
