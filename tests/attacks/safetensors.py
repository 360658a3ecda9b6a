"""Safetensors files whose headers are too large, too deep or wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tests.attacks.attack import add, attack
from tests.attacks.building import entry, safetensors

HUGE = 99_000_000  # bytes of a header, just allowed
_NUMBERS = struct.pack("<4f", 1, 2, 3, 4)

ENTRIES: dict[str, Any] = {
    "65 axes": entry([1] * 65, [0, 4]),
    "no numbers, huge": entry([0, 1 << 62], [0, 0]),
    "more numbers than any": entry([1 << 62, 1 << 62], [0, 16]),
    "sizes of many digits": entry([10**4000], [0, 16]),
    "a negative size": entry([-4], [0, 16]),
    "sizes that are no numbers": entry(["4"], [0, 16]),  # type: ignore[list-item]
    "a size that is no whole number": entry([4.5], [0, 16]),  # type: ignore[list-item]
    "sizes within sizes": entry([[4]], [0, 16]),  # type: ignore[list-item]
    "offsets the wrong way round": entry([4], [16, 0]),
    "negative offsets": entry([4], [-16, 0]),
    "offsets beyond the file": entry([4], [1 << 60, (1 << 60) + 16]),
    "three offsets": entry([4], [0, 8, 16]),
    "no offsets": {"dtype": "F32", "shape": [4]},
    "an unknown type": entry([4], [0, 16], "Q9"),
    "a type of escapes": entry([4], [0, 16], "\x1b[2J"),
    "a very long type": entry([4], [0, 16], "F" * 1_000_000),
    "text in place of all": "F32",
    "nothing in place of all": None,
    "other things besides": {**entry([4], [0, 16]), "extra": [[[[]]]]},
}
for _name, _entry in ENTRIES.items():
    add(
        f"a header with {_name}",
        lambda f, e=_entry: _file(f, {"fc.weight": e}),
        *(0, 1),
    )

HEADERS: dict[str, Any] = {
    "metadata that are no texts": {"__metadata__": {"a": [1]}},
    "metadata that are a list": {"__metadata__": []},
    "very long metadata": {"__metadata__": {"a": "b" * 5_000_000}},
    "a gap": {"a.weight": entry([1], [0, 4]), "b.weight": entry([1], [12, 16])},
    "an overlap": {"a.weight": entry([4], [0, 16]), "b.weight": entry([2], [8, 16])},
    "a very long name": {"n" * 5_000_000: entry([4], [0, 16])},
    "a name of escapes": {"\x1b[31mfc.weight": entry([4], [0, 16])},
    "half a character": {"\ud800": entry([4], [0, 16])},
    "a list": [entry([4], [0, 16])],
    "nothing": {},
    "two equal names": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
    b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "no end": b'{"a":{"dtype":"F32"',
    "two ends": b"{}}",
    "a number of many digits": b'{"a":{"dtype":"F32","shape":['
    + b"9" * 100_000
    + b'],"data_offsets":[0,16]}}',
    "a number beyond all": b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,16]}}',
    "no number": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}',
    "bytes that are no text": b'{"\xff\xfe":1}',
    "a hundred thousand levels": b'{"a":' + b"[" * 100_000,
    "a thousand levels": b'{"a":' + b"[" * 990 + b"]" * 990 + b"}",
}
for _name, _header in HEADERS.items():
    add(f"a header of {_name}", lambda f, h=_header: _file(f, h), 0, 1)


def _file(folder: Path, header: Any, data: bytes = _NUMBERS) -> str:
    safetensors(folder / "a.safetensors", header, data)
    return "inspect a.safetensors"


# What stands before, what is repeated to fill a hundred megabytes, and what stands behind it.
FILLINGS: dict[str, tuple[bytes, bytes, bytes]] = {
    "spaces": (b'{"a":1', b" ", b"}"),
    "text": (b'{"__metadata__":{"a":"', b"b", b'"}}'),
    "wide text": (b'{"__metadata__":{"a":"' + "😀".encode(), b"b", b'"}}'),
    "escaped text": (b'{"__metadata__":{"a":"', b"\\u00e9", b'"}}'),
    "small numbers": (b'{"a":[', b"1,", b"1]}"),
    "numbers": (b'{"a":[', b"257,", b"1]}"),
    "fractions": (b'{"a":[', b"0.5,", b"1]}"),
    "flags": (b'{"a":[', b"true,", b"1]}"),
    "lists": (b'{"a":[', b"[],", b"1]}"),
    "objects": (b'{"a":[', b'{"a":1},', b"1]}"),
    "empty objects": (b'{"a":[', b"{},", b"1]}"),
    "texts": (b'{"a":[', b'"ab",', b"1]}"),
    "equal names": (b'{"a":{', b'"a":1,', b'"a":1}}'),
    "quotes": (b'{"a":"', b'\\"', b'"}'),
}
for _name, _filling in FILLINGS.items():
    add(
        f"a hundred megabytes of {_name}",
        lambda f, h=_filling: _filled(f, *h),
        1,
    )

FEW: dict[str, tuple[bytes, bytes, bytes, int]] = {
    "objects of one entry": (b'{"a":[', b'{"a":1},', b"1]}", 990_000),
    "objects in each other": (b'{"a":[', b'{"a":{"b":{}}},', b"1]}", 390_000),
    "numbers": (b'{"a":[', b"257,", b"1]}", 5_900_000),
    "lists of numbers": (b'{"a":[', b"[257],", b"1]}", 1_900_000),
    "texts": (b'{"a":[', b'"ab",', b"1]}", 1_990_000),
}
for _name, _few in FEW.items():
    add(f"as many {_name} as are allowed", lambda f, h=_few: _filled(f, *h), 1)


def _filled(
    folder: Path, before: bytes, repeated: bytes, behind: bytes, count: int | None = None
) -> str:
    times = HUGE // len(repeated) if count is None else count
    return _file(folder, before + repeated * times + behind)


@attack(1)
def as_many_names_as_are_allowed(folder: Path) -> str:
    """Give a header of very many names."""
    return _file(folder, b'{"a":{' + b",".join(b'"%d":[]' % k for k in range(950_000)) + b"}}")


@attack(1)
def a_header_longer_than_the_file(folder: Path) -> str:
    """Claim a header of a hundred megabytes in a file of a few bytes."""
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", HUGE) + b"{}")
    return "inspect a.safetensors"


@attack(1)
def a_header_longer_than_any(folder: Path) -> str:
    """Claim a header of more bytes than there are."""
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", (1 << 64) - 1) + b"{}")
    return "inspect a.safetensors"


@attack(0, 1, 3)
def as_many_tensors_as_are_allowed(folder: Path) -> str:
    """Give fifty thousand small tensors."""
    return _tensors(folder, [f"l{k}.weight" for k in range(49_999)])


@attack(1)
def more_tensors_than_are_allowed(folder: Path) -> str:
    """Give sixty thousand small tensors."""
    return _tensors(folder, [f"l{k}.weight" for k in range(60_000)])


@attack(0, 1, 3)
def tensors_of_many_layers(folder: Path) -> str:
    """Give weights and biases whose widths fit together, in an order that says nothing."""
    return _tensors(
        folder, sorted(f"layers.{k}.{leaf}" for k in range(6_000) for leaf in ("weight", "bias"))
    )


@attack(0, 1, 3)
def tensors_named_by_numbers(folder: Path) -> str:
    """Give names of many parts and digits."""
    return _tensors(folder, [".".join(str(k)) + ".9" * 50 + ".weight" for k in range(6_000)])


@attack(0, 1, 3)
def tensors_that_could_be_averages(folder: Path) -> str:
    """Give copies by moving averages that could belong to any of ten thousand parts."""
    return _tensors(folder, ["ema.w", "ema.b", *(f"part{k}.w" for k in range(10_000))])


@attack(0, 1, 3)
def tensors_with_dots_at_all_places(folder: Path) -> str:
    """Give names that are the same without their dots."""
    dotted = [
        "".join("a." if k >> bit & 1 else "a" for bit in range(13)) + "a" for k in range(1 << 13)
    ]
    return _tensors(
        folder, [*(f"ema.{n}" for n in dotted[:4_000]), *(f"p.{n}" for n in dotted[4_000:])]
    )


def _tensors(folder: Path, names: list[str]) -> str:
    header = {name: entry([2, 2], [16 * k, 16 * k + 16]) for k, name in enumerate(names)}
    return _file(folder, header, b"\0" * (16 * len(names)))
