"""Data of strangers: arrays that inflate, lie about their shapes or hold objects; pictures."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from tests.attacks.attack import add, attack
from tests.attacks.building import Record, lying_zip, write_zip

MODEL = """from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())
"""


def npy(array: np.ndarray, **header: object) -> bytes:
    """Return an array's file, whose header may say something else."""
    stream = io.BytesIO()
    np.save(stream, array)
    content = stream.getvalue()
    if not header:
        return content
    described = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **header}
    return raw_npy(repr(described).encode(), array.tobytes())


def raw_npy(header: bytes, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """Return an array's file with any header."""
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(header) + 1)
    return b"\x93NUMPY" + version + length + header + b"\n" + data


def scene(folder: Path, x: bytes, y: bytes = b"", *, compressed: bool = False) -> str:
    """Write a data set with one odd array, and return a command that reads it."""
    labels = y or npy(np.zeros(4, np.int64))
    name = "npy" if compressed else "none"
    write_zip(folder / "d.npz", {"x.npy": x, "y.npy": labels}, deflated=name)
    return "partition d.npz --clients 2 --homogeneous -o shards"


_X = np.zeros((4, 6), np.float32)
ARRAYS: dict[str, bytes] = {
    "a huge shape": npy(_X, shape=(1 << 62, 6)),
    "a shape of products": npy(_X, shape=(1 << 40, 1 << 40)),
    "a negative shape": npy(_X, shape=(-4, 6)),
    "many axes": npy(_X, shape=(1,) * 100),
    "a shape of texts": npy(_X, shape=("4", 6)),
    "nothing along an axis": npy(_X, shape=(0, 1 << 62)),
    "objects": npy(_X, descr="|O"),
    "another type": npy(_X, descr="<x9"),
    "a type of many letters": npy(_X, descr="<U1000000000"),
    "a type of bytes": npy(_X, descr="|S1000000000"),
    "a type of parts": npy(_X, descr=[("a", "<f4")] * 2),
    "a type of many parts": npy(_X, descr=[(f"a{k}", "<f4") for k in range(300)]),
    "a type of escapes": npy(_X, descr="\x1b[2J"),
    "a header of code": raw_npy(b"__import__('os').mkdir('canary')"),
    "a header of depth": raw_npy(b"(" * 9_000),
    "a header of minuses": raw_npy(b"-" * 9_000 + b"1"),
    "a header of products": raw_npy(
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,)}"
    ),
    "a header of nothing": raw_npy(b""),
    "a long header": raw_npy(b"{" + b" " * 60_000 + b"}"),
    "a very long header": raw_npy(b"{" + b" " * 20_000_000 + b"}", version=b"\2\0"),
    "a header that claims four gigabytes": b"\x93NUMPY\2\0\xff\xff\xff\xff{}",
    "another version": raw_npy(b"{}", version=b"\x09\0"),
    "no array": b"abc",
    "nothing": b"",
    "dates": npy(np.zeros(4, "M8[s]")),
    "complex numbers": npy(np.zeros((4, 6), np.complex64)),
    "texts": npy(np.array(["a"] * 4)),
    "too few numbers": npy(_X)[:-8],
    "too many numbers": npy(_X) + b"\0" * 8,
    "no numbers": npy(_X, descr="<f4").split(b"\n")[0],
}
for _name, _array in ARRAYS.items():
    for _kind in (False, True):
        add(
            f"an array of {_name}, {'compressed' if _kind else 'stored'}",
            lambda f, a=_array, c=_kind: scene(f, a, compressed=c),
            *(0, 1, 2, 4),
        )


@attack(1)
def an_array_that_inflates(folder: Path) -> str:
    """Compress four gigabytes of zeros."""
    header = npy(np.zeros((1, 1 << 20), np.float32), shape=(1 << 10, 1 << 20))[:128]
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(header) + packer.flush(zlib.Z_FULL_FLUSH)
    zeros = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    stream = start + zeros * (1 << 8) + packer.flush()  # after a full flush blocks may be repeated
    size = 128 + (1 << 32)
    record = Record(b"x.npy", stream, claimed=len(stream), method=8)
    lying_zip(folder / "d.npz", [record, Record(b"y.npy", npy(np.zeros(4, np.int64)))])
    content = (folder / "d.npz").read_bytes()
    place = content.index(b"PK\1\2")  # the size that the directory claims
    patched = content[: place + 24] + struct.pack("<I", size & 0xFFFFFFF) + content[place + 28 :]
    (folder / "d.npz").write_bytes(patched)
    return "partition d.npz --clients 2 --homogeneous -o shards"


@attack(1)
def many_arrays(folder: Path) -> str:
    """Give thirty thousand arrays."""
    records = [Record(b"%d.npy" % k, at=0) for k in range(30_000)]
    lying_zip(folder / "d.npz", records)
    return "partition d.npz --clients 2 --homogeneous -o shards"


@attack(1)
def a_damaged_array(folder: Path) -> str:
    """Damage the compressed bytes of an array."""
    with zipfile.ZipFile(folder / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        noise = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
        archive.writestr("x.npy", npy(noise))
        archive.writestr("y.npy", npy(np.zeros(50, np.int64)))
    content = bytearray((folder / "d.npz").read_bytes())
    content[400:440] = b"\xff" * 40
    (folder / "d.npz").write_bytes(content)
    return "partition d.npz --clients 2 --homogeneous -o shards"


@attack(1, 4)
def tensors_that_run_code_as_data(folder: Path) -> str:
    """Give data whose pickle would make a folder."""
    from tests.attacks.building import PROTOCOL_2, torch_zip

    torch_zip(folder / "d.pt", PROTOCOL_2 + b"cos\nmkdir\nX\6\0\0\0canary\x85R.")
    return "partition d.pt --clients 2 --homogeneous -o shards"


@attack(1, 4)
def objects_as_data(folder: Path) -> str:
    """Give an array of objects, which would have to be unpickled."""
    import os
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, ("canary",)

    content = raw_npy(
        b"{'descr': '|O', 'fortran_order': False, 'shape': (4,)}", pickle.dumps([Payload()])
    )
    return scene(folder, content)
