"""Files as torch wrote them before 1.6, with storages that are not what they say."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

from tests.attacks.attack import add, attack
from tests.attacks.building import (
    PROTOCOL_2,
    legacy,
    legacy_storage,
    number,
    numbers,
    state_dict,
    tensor,
    text,
)
from tests.attacks.pickles import doubled, get, put

_NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
_TREE = state_dict(("fc.weight", tensor(held=legacy_storage("0", 4))))


def _file(
    folder: Path, tree: bytes, keys: object, counts: Sequence[int] = (4,), data: bytes = _NUMBERS
) -> str:
    pickled = keys if isinstance(keys, bytes) else pickle.dumps(keys, 2)
    legacy(folder / "a.pt", tree, pickled, counts, data)
    return "inspect a.pt"


KEYS: dict[str, object] = {
    "none": [],
    "another": ["1"],
    "one too many": ["0", "1"],
    "the same one twice": ["0", "0"],
    "no list": "0",
    "lists": [["0"]],
    "a dictionary": [{"0": 0}],
    "nested in each other": PROTOCOL_2 + b"]" + doubled(60) + b"a.",
    "a number": [0],
    "nothing": None,
}
for _name, _keys in KEYS.items():
    add(f"keys of storages that are {_name}", lambda f, k=_keys: _file(f, _TREE, k), 1)
for _count in (0, 3, 5, 1 << 20, 1 << 62, (1 << 64) - 1):
    add(f"a storage counted as {_count}", lambda f, c=_count: _file(f, _TREE, ["0"], (c,)), 0, 1)

VIEWS: dict[str, bytes] = {
    "nested pairs": doubled(60),
    "a list": b"]",
    "another storage": text("1"),
    "nothing": b"N",
    "a very long text": text("k" * 5_000_000),
}
for _name, _key in VIEWS.items():
    _view = b"(" + _key + number(0) + number(4) + b"t"
    _tree = state_dict(("fc.weight", tensor(held=legacy_storage("0", 4, _view))))
    add(f"a view called by {_name}", lambda f, t=_tree: _file(f, t, ["0"]), 0, 1)
PLACES = {"before": (-1, 4), "beyond": (1, 4), "far beyond": (0, 1 << 62), "of nothing": (4, 0)}
for _name, (_offset, _size) in PLACES.items():
    _view = b"(" + text("v") + number(_offset) + number(_size) + b"t"
    _tree = state_dict(("fc.weight", tensor(held=legacy_storage("0", 4, _view))))
    add(f"a view {_name}", lambda f, t=_tree: _file(f, t, ["0"]), 0, 1)


@attack(1)
def a_million_keys(folder: Path) -> str:
    """Name one storage a million times, each time without numbers."""
    keys = PROTOCOL_2 + text("0") + put(0) + b"0](" + get(0) * 600_000 + b"e."
    return _file(folder, _TREE, keys, (), b"\0" * 4_800_000)


@attack(0, 1)
def many_storages(folder: Path) -> str:
    """Give ten thousand storages of one number."""
    names = [str(k) for k in range(10_000)]
    entries = [(f"l{k}.weight", tensor([1], [1], held=legacy_storage(k, 1))) for k in names]
    data = struct.pack("<Qf", 1, 0.5) * len(names)
    return _file(folder, state_dict(*entries), names, (), data)


@attack(1)
def two_types_of_one_storage(folder: Path) -> str:
    """Read one storage as floats and as bytes."""
    bytes_ = legacy_storage("0", 4).replace(b"FloatStorage", b"ByteStorage")
    tree = state_dict(("a", tensor(held=legacy_storage("0", 4))), ("b", tensor(held=bytes_)))
    return _file(folder, tree, ["0"])


@attack(1)
def numbers_the_other_way_round(folder: Path) -> str:
    """Claim a machine that writes numbers from the other end."""
    path = folder / "a.pt"
    _file(folder, _TREE, ["0"])
    content = path.read_bytes()
    right = pickle.dumps({"little_endian": True}, 2)
    path.write_bytes(content.replace(right, pickle.dumps({"little_endian": False}, 2)))
    return "inspect a.pt"


@attack(1, 4)
def work_before_the_magic_number(folder: Path) -> str:
    """Let the first pickle do half a million things until it is torch's magic number."""
    magic = PROTOCOL_2 + b"N0" * 490_000 + number(0x1950A86A20F9469CFC6C) + b"."
    (folder / "a.pt").write_bytes(magic + magic)
    return "inspect a.pt"


@attack(1, 4)
def an_odd_system(folder: Path) -> str:
    """Give a shape in place of the system's description."""
    head = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001))
    (folder / "a.pt").write_bytes(head + PROTOCOL_2 + numbers([1, 2]) + b"." + _TREE)
    return "inspect a.pt"
