"""Arrays of numpy's files: the same as numpy reads, and refused where anything is wrong."""

from __future__ import annotations

import io
import os
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedmerge.checkpoint import StoredRows, in_memory, open_npz, read_npy
from fedmerge.errors import CheckpointError, FedmergeError, UnsafeCheckpointError
from fedmerge.values import Array

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6)).astype(np.float32)
ARRAYS: dict[str, Array] = {
    "x": X,
    "y": np.zeros(50, int),
    "turned": np.asfortranarray(X.astype(np.float16)),
    "big": X.astype(">f8"),
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "flags": X[:, 0] > 0,
    "words": np.array(["a", "bcd", "ä"] * 3),
    "raw": np.array([b"a", b"bcd"]),
    "one": np.array(7),
    "none": np.zeros((0, 4), np.float32),
    "empty rows": np.zeros((3, 0), np.int64),
}
SAVERS = [np.savez, np.savez_compressed]


@pytest.fixture(params=["whole", "rows"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read arrays at once, and row by row as if they were large."""
    if request.param == "rows":
        monkeypatch.setattr("fedmerge.checkpoint.npz._READ_WHOLE", 0)
    return str(request.param)


def loaded(path: Path) -> dict[str, Array]:
    return {name: in_memory(read()) for name, read in open_npz(path).items()}


@pytest.mark.parametrize("save", SAVERS)
def test_arrays_are_those_that_numpy_wrote(save: Callable[..., None], tmp_path: Path) -> None:
    save(tmp_path / "a.npz", **ARRAYS)
    found = loaded(tmp_path / "a.npz")
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert np.array_equal(found[name], array)
        found[name][...] = array  # what was read can be changed


def test_an_array_of_its_own_is_the_one_that_numpy_wrote(tmp_path: Path) -> None:
    for name, array in ARRAYS.items():
        np.save(tmp_path / f"{name}.npy", array)
        found = read_npy(tmp_path / f"{name}.npy")
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_rows_of_a_large_array_are_read_one_by_one(tmp_path: Path, way: str) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    rows = open_npz(tmp_path / "a.npz")["x"]()
    assert isinstance(rows, StoredRows) == (way == "rows")
    assert (rows.shape, rows.ndim, rows.dtype, len(rows)) == (X.shape, 2, X.dtype, 50)
    for chosen in (
        np.array([3, 4, 5, 0, 49]),
        np.array([], int),
        slice(2, 9),
        slice(None, None, 7),
    ):
        assert np.array_equal(rows[chosen], X[chosen])
    with pytest.raises(IndexError, match="50"):
        rows[np.array([50])]


def mutants(content: bytes, count: int, *, seed: int) -> list[bytes]:
    """Return damaged copies: bits, bytes, runs, cuts and insertions."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            place, length = rng.randrange(len(damaged) or 1), rng.randrange(1, 40)
            kind = rng.randrange(5)
            if kind == 0 and damaged:
                damaged[place] ^= 1 << rng.randrange(8)
            elif kind == 1:
                damaged[place : place + length] = rng.choice([b"\xff", b"\0"]) * length
            elif kind == 2:
                del damaged[place:]
            elif kind == 3:
                damaged[place:place] = rng.randbytes(length)
            else:
                del damaged[place : place + length]
        found.append(bytes(damaged))
    return found


@pytest.mark.parametrize("save", SAVERS)
def test_a_damaged_file_is_refused_or_gives_the_same_numbers(
    save: Callable[..., None], tmp_path: Path
) -> None:
    whole, path = io.BytesIO(), tmp_path / "damaged.npz"
    save(whole, x=X, y=ARRAYS["y"])
    refused = 0
    for content in mutants(whole.getvalue(), 200, seed=1):
        path.write_bytes(content)
        try:
            found = loaded(path)
        except FedmergeError as error:
            assert str(path) in error.problem  # noqa: PT017
            refused += 1
        else:
            same = {name: array for name, array in ARRAYS.items() if name in found}
            assert all(np.array_equal(found[name], array) for name, array in same.items())
    assert refused > 150


def zipped(path: Path, content: bytes, **changes: int) -> Path:
    """Write an archive with one array `x`, whose directory says what it likes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
        for name, value in changes.items():
            setattr(archive.infolist()[0], name, value)
    return path


def npy(shape: tuple[int, ...], content: bytes, *, descr: str = "'|u1'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


@pytest.mark.parametrize("is_true", [True, False])
def test_an_array_that_inflates_beyond_all_measure_is_refused_for_nothing(
    is_true: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmerge.checkpoint.npz.LARGEST_INFLATED", 1_000_000)
    size = 8_000_000 if is_true else 8_000_000_000
    content = npy((size,), bytes(size if is_true else 100))
    claim = {} if is_true else {"file_size": size + len(npy((size,), b""))}
    path = zipped(tmp_path / "bomb.npz", content, **claim)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"would fill 8,[0-9,]+ bytes, of a file of [0-9]"):
        open_npz(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_small_files_may_inflate_as_much_as_they_like(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros(10_000_000, np.uint8))
    assert (tmp_path / "zeros.npz").stat().st_size < 20_000
    assert loaded(tmp_path / "zeros.npz")["x"].size == 10_000_000


def test_no_compression_is_believed_that_deflate_can_not_reach(tmp_path: Path) -> None:
    size = 1_000_000
    path = zipped(
        tmp_path / "lie.npz",
        npy((size,), bytes(50)),
        file_size=size + len(npy((size,), b"")),
    )
    with pytest.raises(CheckpointError, match=r"'x': truncated or damaged \(1,000,\d+ bytes out"):
        loaded(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_that_numpy_never_uses_is_refused(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("x.npy", npy((9,), bytes(9)))
    with pytest.raises(CheckpointError, match="'x' is encrypted, or compressed as numpy never"):
        loaded(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("descr", "shape", "reason"),
    [
        ("'|u1'", (10,), "9 bytes, too few or many for"),
        ("'|u1'", (2**62, 4), "has the shape"),
        ("'|u1'", (0, 2**63), "has the shape"),
        ("'|u1'", (1,) * 65, "has 65 axes"),
        ("'|u1'", (-1,), "not that of numbers"),
        ("'S0'", (9,), "fills nothing"),
        ("'i3'", (3,), "unknown type 'i3'"),
        ("'|V4'", (2,), "unknown type"),
        ("'<M8[ns]'", (1,), "unknown type"),
        ("[('a', '|u1')]", (9,), "not that of numbers"),
        ("(" * 4000, (9,), "not that of numbers"),
        ("'|u1'" + " " * 60_000, (9,), "its header should have"),
        ("__import__('os').abort()", (9,), "not that of numbers"),
        ("'|u1', 'shape': (9,), 'x': '", (9,), "not that of numbers"),
    ],
)
def test_a_header_that_is_none_is_refused(
    descr: str, shape: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    content = npy(shape, bytes(9), descr=descr)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(CheckpointError, match=rf"a\.npz: 'x': truncated or damaged \(.*{reason}"):
        loaded(tmp_path / "a.npz")
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_npy(tmp_path / "x.npy")


@pytest.mark.parametrize("descr", ["'|O'", "[('a', '|O'), ('b', '<f4')]", '"O8"'])
def test_objects_are_refused_unread(descr: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy((9,), bytes(9), descr=descr))
    with pytest.raises(UnsafeCheckpointError, match=r"'x': refused, it holds Python objects"):
        loaded(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i2', 'fortran_order': False, 'shape': (2L, 3L), }",
        '{"shape": (2,3,), "fortran_order": False, "descr": "<i2"}',
        "{ 'fortran_order' : False ,'descr':'i2','shape':(2, 3) }",
    ],
)
def test_headers_of_other_writers_are_read(header: str, tmp_path: Path) -> None:
    text = f"{header}\n".encode()
    content = np.arange(6, dtype=np.int16)
    (tmp_path / "a.npy").write_bytes(
        b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + content.tobytes()
    )
    assert read_npy(tmp_path / "a.npy").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_names_that_occur_twice_are_refused_and_other_records_ignored(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy((1,), b"a"))
        archive.writestr("readme.txt", "no array")
    assert list(open_npz(tmp_path / "a.npz")) == ["x"]
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "a") as archive,
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        archive.writestr("x.npy", npy((1,), b"b"))
    with pytest.raises(CheckpointError, match="holds 'x' more than once"):
        open_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("change", ["shrinks", "is overwritten"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    change: str, tmp_path: Path, way: str
) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=X)
    column = open_npz(path)["x"]
    rows = column()
    if change == "shrinks":
        os.truncate(path, 300)
    else:
        with path.open("r+b") as file:
            file.seek(400)
            file.write(b"\xff" * 40)
        os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"a\.npz: changed while it was being read"):
        rows[np.array([1])] if way == "rows" else column()


def test_large_arrays_are_compared_with_their_checksum_once(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[500] ^= 1
    (tmp_path / "b.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"b\.npz: 'x': .*contradict their checksum"):
        open_npz(tmp_path / "b.npz")["x"]()
    open_npz(tmp_path / "a.npz")["x"]()
    monkeypatch.setattr("fedmerge.checkpoint.npz._checked_chunks", lambda *_: 1 / 0)
    if way == "rows":
        assert np.array_equal(open_npz(tmp_path / "a.npz")["x"]()[:], X)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.npz: cannot be read \(No such file"):
        open_npz(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(CheckpointError, match=r"text\.npz: truncated or damaged"):
        open_npz(tmp_path / "text.npz")
