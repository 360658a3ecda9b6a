"""Arrays into `.npz` files, block by block."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.lib import format as npy

from fedmerge.types.arrays import Array


@dataclass(frozen=True)
class Column:
    """An array to be written: its shape, numpy's code of its dtype, and its rows in blocks."""

    shape: tuple[int, ...]
    dtype: str
    blocks: Iterable[Array]


def write_npz(file: IO[bytes], columns: Mapping[str, Column]) -> None:
    """Write arrays uncompressed: rows can be read alone, and the bytes depend on content alone."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": column.dtype, "fortran_order": False, "shape": column.shape}
                npy.write_array_header_1_0(member, header)
                for block in column.blocks:
                    member.write(np.ascontiguousarray(block, column.dtype).tobytes())
