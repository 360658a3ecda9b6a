"""Arrays in `.npz` files: mapped instead of read where possible, never unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from fedmerge.types.arrays import Array

_LENGTHS_AT = 26  # in the header of a zip record: the lengths of its name and of its extra field
_HEADER_SIZE = 30  # of that header without name and extra field


@dataclass(frozen=True)
class Column:
    """An array to be written: its shape, numpy's code of its dtype, and its rows in blocks."""

    shape: tuple[int, ...]
    dtype: str
    blocks: Iterable[Array]


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in a file."""
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def map_npz(path: Path, name: str) -> Array:
    """Return one array: mapped copy-on-write if it is stored plainly, else read.

    Arrays of Python objects raise `ValueError`: they would have to be unpickled.
    """
    return _mapped(path, name) if _is_plain(path, name) else _loaded(path, name)


def write_npz(file: IO[bytes], columns: Mapping[str, Column]) -> None:
    """Write arrays uncompressed, so that they can be mapped; the bytes depend on content alone."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": column.dtype, "fortran_order": False, "shape": column.shape}
                npy.write_array_header_1_0(member, header)
                for block in column.blocks:
                    member.write(np.ascontiguousarray(block, column.dtype).tobytes())


def _is_plain(path: Path, name: str) -> bool:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1


def _loaded(path: Path, name: str) -> Array:
    with np.load(path, allow_pickle=False) as arrays:
        array: Array = arrays[name]
    return array


def _mapped(path: Path, name: str) -> Array:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as member:
            shape, is_fortran, dtype = _read_header(member)
            begin = member.tell()
    if dtype.hasobject or not all(shape):  # nothing there that a map could show
        return _loaded(path, name)
    if int(np.prod(shape)) * dtype.itemsize != info.file_size - begin:
        raise ValueError(
            f"'{name}' has {info.file_size - begin} bytes, too few or many for {shape}"
        )
    offset = _data_offset(path, info) + begin
    # Copy-on-write: nobody can change the file through the map.
    array: Array = np.memmap(path, dtype, "c", offset, shape, "F" if is_fortran else "C")
    return array


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(member)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    header: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(member)
    return header


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a stored record begin in the file."""
    with path.open("rb") as file:
        file.seek(info.header_offset + _LENGTHS_AT)
        lengths = file.read(4)
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return info.header_offset + _HEADER_SIZE + name + extra
