"""Tables, saved data sets and pictures of strangers: sizes that inflate, links, odd formats."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
from PIL import Image

from tests.attacks.attack import add, attack

SPLIT = "partition {} --clients 2 --homogeneous --force -o shards"


def _csv(text: str) -> Callable[[Path], str]:
    def build(folder: Path) -> str:
        (folder / "d.csv").write_text(text)
        return SPLIT.format("d.csv")

    return build


TEXTS: dict[str, Callable[[], str]] = {
    "a million columns": lambda: ",".join(map(str, range(1_000_000))) + "\n",
    "a million columns of one row": lambda: (
        ",".join(map(str, range(999_999))) + ",y\n" + ",".join(["1"] * 1_000_000) + "\n"
    ),
    "ten million columns of no name": lambda: "," * 10_000_000 + "\n",
    "ten million rows of nothing": lambda: "\n" * 10_000_000,
    "a million rows": lambda: "a,y\n" + "1,0\n" * 1_000_000,
    "one long text and many short": lambda: "a,y\n" + "b" * 131_000 + ",0\n" + "c,0\n" * 300_000,
    "a field of great length": lambda: "a,y\n" + "b" * 20_000_000 + ",0\n",
    "a quote without end": lambda: 'a,y\n"' + "1,0\n" * 100_000,
    "names of escapes": lambda: "\x1b[2J,\x1b]0;a\x07\n1,2\n",
    "nulls": lambda: "a,y\n\0,\0\n",
    "numbers beyond all": lambda: "a,y\n" + "9" * 100_000 + ",0\n1e99999,1\n",
    "targets beyond all": lambda: "a,y\n1,9223372036854775807\n2,-9223372036854775808\n",
    "targets of nan": lambda: "a,y\n1,nan\n2,inf\n",
    "names twice": lambda: "a,a,y,y\n1,2,0,1\n3,4,1,0\n",
    "nothing": lambda: "",
    "a header alone": lambda: "a,y\n",
    "labels of escapes": lambda: "a,y\n1,\x1b[2J\n2,b\n",
}
for _name, _text in TEXTS.items():
    add(f"a table of {_name}", lambda folder, t=_text: _csv(t())(folder), 0, 1, 2, 4)


def _odd(make: Callable[[Path], None], name: str) -> Callable[[Path], str]:
    def build(folder: Path) -> str:
        make(folder / name)
        return SPLIT.format(name)

    return build


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50_000_000_000)


for _suffix in (".csv", ".parquet"):
    add(f"a pipe as {_suffix}", _odd(lambda path: os.mkfifo(path), f"d{_suffix}"), 1, 2)
    add(f"zeros as {_suffix}", _odd(_zeros, f"d{_suffix}"), 1, 2)
    add(f"a sparse file as {_suffix}", _odd(_sparse, f"d{_suffix}"), 1, 2)


# Parquet


def _table(table: arrow.Table, **options: object) -> Callable[[Path], str]:
    def build(folder: Path) -> str:
        parquet.write_table(table, folder / "d.parquet", **options)
        return SPLIT.format("d.parquet")

    return build


def _pictures(values: list[object], kind: arrow.DataType) -> arrow.Table:
    own = arrow.array(values, kind)
    column = arrow.StructArray.from_arrays([own], ["bytes"], mask=own.is_null())
    return arrow.table({"x": column, "y": [0] * len(values)})


@attack(1, 2)
def a_table_that_inflates(folder: Path) -> str:
    """Store a billion zeros in little."""
    ones = arrow.array([0] * 10_000_000)
    chunks = arrow.chunked_array([ones] * 30)
    table = arrow.table({"x": chunks, "y": chunks})
    return _table(table, compression="zstd")(folder)


@attack(1, 2)
def a_table_of_long_texts(folder: Path) -> str:
    """Let a dictionary's one long text stand in many rows."""
    column = arrow.DictionaryArray.from_arrays(
        arrow.array([0] * 100_000, arrow.int32()), arrow.array(["a" * 1_000_000])
    )
    return _table(arrow.table({"x": column, "y": [0] * 100_000}))(folder)


@attack(0, 1, 2)
def a_table_of_many_small_numbers(folder: Path) -> str:
    """Store numbers that take many times as much as Python's."""
    table = arrow.table({"x": arrow.array([0] * 3_000_000, arrow.int8()), "y": [0] * 3_000_000})
    return _table(table)(folder)


@attack(1)
def a_table_of_paths(folder: Path) -> str:
    """Let a column of pictures name a picture elsewhere, by a text in place of its bytes."""
    outside = folder / "outside.png"
    Image.new("RGB", (2, 2), (7, 7, 7)).save(outside)
    return _table(_pictures([str(outside)] * 4, arrow.string()))(folder)


_COLUMNS: dict[str, arrow.Array] = {
    "dictionaries": arrow.array([{"a": 1}] * 4),
    "missing pictures": _pictures([b"", None, None, b""], arrow.binary())["x"].chunk(0),
    "missing numbers": arrow.array([1.0, None, 2.0, 3.0]),
    "dates": arrow.array([1, 2, 3, 4], arrow.timestamp("ns")),
    "dates beyond all": arrow.array([2**62] * 4, arrow.timestamp("ms")),
    "lists in lists": arrow.array([[[[[1]]]]] * 4),
    "no numbers": arrow.nulls(4),
    "decimals": arrow.array([1, 2, 3, 4]).cast(arrow.decimal128(38)),
    "bytes": arrow.array([b"a"] * 4),
    "numbers too large": arrow.array([2**64 - 1] * 4, arrow.uint64()),
    "maps": arrow.array([[(1, 2)]] * 4, arrow.map_(arrow.int8(), arrow.int8())),
}
for _name, _column in _COLUMNS.items():
    for _key, _table_of in {
        "samples": arrow.table({"x": _column, "y": [0] * 4}),
        "targets": arrow.table({"x": [0.5] * 4, "y": _column}),
    }.items():
        add(f"a parquet of {_name} as {_key}", _table(_table_of), 0, 1, 2, 4)


def _first_thousand(position: int) -> Callable[[Path], str]:
    def build(folder: Path) -> str:
        table = arrow.table({"x": [0.5] * 4, "y": [0] * 4})
        command = _table(table)(folder)
        path = folder / "d.parquet"
        content = bytearray(path.read_bytes())
        content[position] ^= 0xFF
        path.write_bytes(bytes(content))
        return command

    return build


for _position in (0, 4, 8, 20, 40, 60, -5, -8, -9, -40, -100, -150, -200, -250, -300):
    add(f"a parquet that lies at {_position}", _first_thousand(_position), 0, 1, 2, 4)


# Data sets that `datasets` saved


def _stream(path: Path, table: arrow.Table) -> None:
    with path.open("wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def _saved(state: str, *files: tuple[str, arrow.Table]) -> Callable[[Path], str]:
    def build(folder: Path) -> str:
        inner = folder / "saved"
        inner.mkdir()
        for name, table in files:
            _stream(inner / name, table)
        (inner / "state.json").write_text(state)
        return SPLIT.format("saved")

    return build


def _names(*names: str) -> str:
    return json.dumps({"_data_files": [{"filename": name} for name in names]})


_PLAIN = arrow.table({"x": [0.5] * 4, "y": [0] * 4})
_OTHER = arrow.table({"z": ["a"] * 4})
STATES: dict[str, str] = {
    "a file elsewhere": _names("../outside.arrow"),
    "a file at the root": _names("/etc/passwd"),
    "many names of one file": _names(*["a.arrow"] * 300_000),
    "files that don't fit": _names("a.arrow", "b.arrow"),
    "no files": _names(),
    "depth": "[" * 100_000,
    "a list": "[]",
    "files that are numbers": '{"_data_files": [{"filename": 7}]}',
    "a name of null": _names("a\0b"),
    "zeros": _names("zeros"),
    "a pipe": _names("pipe"),
    "a folder": _names("."),
    "a name of escapes": _names("\x1b[2J"),
}
for _name, _state in STATES.items():

    def _build(folder: Path, state: str = _state) -> str:
        _stream(folder / "outside.arrow", _PLAIN)
        command = _saved(state, ("a.arrow", _PLAIN), ("b.arrow", _OTHER))(folder)
        (folder / "saved" / "zeros").symlink_to("/dev/zero")
        os.mkfifo(folder / "saved" / "pipe")
        return command

    add(f"a saved data set of {_name}", _build, 1)


# Pictures


def _png(width: int, height: int, *, lines: int | None = None, kind: int = 2) -> bytes:
    """Return a picture of one colour, packed as far as it goes."""
    row = b"\0" * (1 + width * (3 if kind == 2 else 1))
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(row) for _ in range(height if lines is None else lines))
    chunks = (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, kind, 0, 0, 0)),
        (b"IDAT", packed + packer.flush()),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + _checksum(name + content)
        for name, content in chunks
    )


def _checksum(content: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(content))


_EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n"
    b"(canary) (w) file closefile\nshowpage\n%%EOF\n"
)


def _ppm() -> bytes:
    return b"P6 2 2 255\n" + b"\0" * 12


PICTURES: dict[str, Callable[[], bytes]] = {
    "a hundred thousand pixels each way": lambda: _png(100_000, 100_000, lines=1),
    "ten thousand pixels each way": lambda: _png(10_000, 10_000, lines=1),
    "nine thousand real pixels each way": lambda: _png(9_000, 9_000),
    "thirteen thousand real grey pixels each way": lambda: _png(13_000, 13_000, kind=0),
    "no pixels": lambda: _png(0, 0),
    "a program for printers": lambda: _EPS,
    "another format": _ppm,
    "nothing": lambda: b"",
    "half a picture": lambda: _png(40, 40)[:60],
    "a damaged chunk": lambda: _png(40, 40).replace(b"IDAT", b"IDAX"),
    "a header of nothing": lambda: _png(4, 4)[:8] + b"\0\0\0\0IHDR" + b"\0" * 40,
    "a strange GIF": lambda: b"GIF89a" + b"\xff" * 50,
    "a strange BMP": lambda: b"BM" + b"\xff" * 60,
    "a strange WEBP": lambda: b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 60,
    "a strange JPEG": lambda: b"\xff\xd8\xff\xe0\0\x10JFIF" + b"\xff" * 60,
}
for _name, _content in PICTURES.items():

    def _shown(folder: Path, content: Callable[[], bytes] = _content) -> str:
        for name in ("0", "1"):
            (folder / "pictures" / name).mkdir(parents=True)
            (folder / "pictures" / name / "a.png").write_bytes(content())
        return SPLIT.format("pictures")

    add(f"a picture of {_name}", _shown, 0, 1)

    def _packed(folder: Path, content: Callable[[], bytes] = _content) -> str:
        return _table(_pictures([content()] * 2, arrow.binary()))(folder)

    add(f"a picture in a table of {_name}", _packed, 0, 1)


@attack(0, 1)
def many_small_pictures_that_are_large(folder: Path) -> str:
    """Give pictures that are each within bounds, and together beyond them."""
    content = _png(2_000, 2_000)
    (folder / "pictures" / "0").mkdir(parents=True)
    for k in range(60):
        (folder / "pictures" / "0" / f"{k}.png").write_bytes(content)
    return SPLIT.format("pictures")


for _name, _make in {
    "a pipe": lambda path: os.mkfifo(path),
    "zeros": _zeros,
    "a sparse file": _sparse,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
}.items():

    def _linked(folder: Path, make: Callable[[Path], None] = _make) -> str:
        (folder / "pictures" / "0").mkdir(parents=True)
        make(folder / "pictures" / "0" / "a.png")
        return SPLIT.format("pictures")

    add(f"a picture that is {_name}", _linked, 1)


@attack(0, 1)
def pictures_in_folders_that_are_links(folder: Path) -> str:
    """Let a folder of pictures hold itself."""
    (folder / "pictures" / "0").mkdir(parents=True)
    (folder / "pictures" / "0" / "a.png").write_bytes(_png(4, 4))
    (folder / "pictures" / "1").symlink_to(folder / "pictures")
    return SPLIT.format("pictures")
