"""Pickles that would run code, nest, grow, collide or go on for ever."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from tests.attacks.attack import add, attack
from tests.attacks.building import (
    MAKE_CANARY,
    PROTOCOL_2,
    REBUILD,
    number,
    numbers,
    state_dict,
    storage,
    tensor,
    text,
    torch_zip,
)

MANY = 1_000_000
ENCODE = b"c_codecs\nencode\n"
ORDERED = b"ccollections\nOrderedDict\n"


def put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def doubled(times: int, start: bytes = b"K\x01\x85") -> bytes:
    """Return the opcodes of a pair of the same pair of the same pair …"""
    return start + b"2\x86" * times


def again(opcodes: bytes, times: int) -> bytes:
    """Return opcodes that are run so many times, their results dropped."""
    return (opcodes + b"0") * times


# Code, by every way that a pickle has to call it

_TARGET = text("import os; os.mkdir('canary')")
CALLS = {
    "reduce": b"cbuiltins\nexec\n" + _TARGET + b"\x85R",
    "instance": b"(" + _TARGET + b"ibuiltins\nexec\n",
    "object": b"(cbuiltins\nexec\n" + _TARGET + b"o",
    "new object": b"cbuiltins\nexec\n" + _TARGET + b"\x85\x81",
    "new object with keywords": b"cbuiltins\nexec\n" + _TARGET + b"\x85}\x92",
    "stack global": b"\x8c\x08builtins\x8c\x04exec\x93" + _TARGET + b"\x85R",
    "name of Python 2": b"c__builtin__\nexecfile\n" + _TARGET + b"\x85R",
    "through the memo": b"cbuiltins\nexec\n" + put(7) + b"0" + get(7) + _TARGET + b"\x85R",
    "through a tensor's class": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nexec\n"
    b"ctorch\nTensor\n" + _TARGET + b"\x85}tR",
    "state": b"cos\nPathLike\n)R}" + text("__reduce__") + MAKE_CANARY + b"sb",
    "extension": b"\x82\x01" + _TARGET + b"\x85R",
    "torch's own loader": b"ctorch.serialization\nload\n" + text("a.pt") + b"\x85R",
    "a template's code": b"ctorch\nload_inline\n" + _TARGET + b"\x85R",
    "getattr": b"cbuiltins\ngetattr\ncos\nmkdir\n" + text("__call__") + b"\x86R",
    "dotted name": b"\x8c\x05torch\x8c\x0f_utils.os.mkdir\x93" + text("canary") + b"\x85R",
    "dotted name of ours": b"\x8c\x08fedmerge\x8c\x0bcli.main.os\x93)R",
}
for _name, _call in CALLS.items():
    _pickle = state_dict(("fc.weight", tensor()), ("extra", _call)).replace(
        b"\x80\x02", b"\x80\x04", 1
    )
    add(f"code called by {_name}", lambda f, p=_pickle: _zip(f, p), 1, 4)


def _zip(folder: Path, pickled: bytes, **records: bytes) -> str:
    torch_zip(folder / "a.pt", pickled)
    return "inspect a.pt"


def _value(name: str, make: Callable[[], bytes], *codes: int) -> None:
    """Register a state dict with one odd value."""
    add(
        name,
        lambda folder: _zip(folder, state_dict(("fc.weight", tensor()), ("odd", make()))),
        *codes,
    )


# Depth

_value("a key five thousand tuples deep", lambda: b"})" + b"\x85" * 5_000 + b"Ns", 0, 1)
_value("a key a million tuples deep", lambda: b"})" + b"\x85" * MANY + b"Ns", 0, 1)
_value("a value a million tuples deep", lambda: b")" + b"\x85" * MANY, 0, 1)
_value("lists a million deep", lambda: b"]" * 900_000 + b"a" * 899_999, 0, 1)
_value("dictionaries deep", lambda: b"}K\x00" * 200_000 + b"N" + b"s" * 200_000, 0, 1)
_value("marks without end", lambda: b"(" * 1_900_000 + b"t" * 1_900_000, 0, 1)

# Sizes

_codec = ENCODE + text("abcdefgh") + text("latin1") + b"\x86R"
for _ in range(40):
    _codec = ENCODE + _codec + text("hex_codec") + b"\x86R"
_WIDE = "".join(map(chr, [*range(0x4E00, 0x9FFF), *range(0xAC00, 0xD7A0)])) * 4
_value("a codec that doubles", lambda: _codec, 1, 4)
_value("a slow codec", lambda: ENCODE + text(_WIDE) + text("punycode") + b"\x86R", 1, 4)
_value(
    "a long text to encode",
    lambda: ENCODE + text("é" * 20_000_000) + text("latin1") + b"\x86R",
    0,
    1,
)
_value(
    "bytes by their number", lambda: b"cbuiltins\nbytearray\n" + number(8 << 30) + b"\x85R", 1, 4
)
_value("a set of many", lambda: b"cbuiltins\nset\n(]" + b"(" + b"K\x01" * MANY + b"etR", 0, 1)
_value("a number of many digits", lambda: b"L" + b"9" * 9_990 + b"L\n", 1)
_value(
    "a number of many bytes", lambda: b"\x8b" + struct.pack("<I", 3 << 20) + b"\x7f" * (3 << 20), 1
)
_value("numbers of many digits", lambda: again(b"I" + b"7" * 4_200 + b"\n", 5_000), 0, 1)
_value("a text that claims to be long", lambda: b"\x8d" + struct.pack("<Q", 1 << 62) + b"abc", 1)
_value(
    "bytes that claim to be long", lambda: b"\x8e" + struct.pack("<Q", (1 << 64) - 1) + b"abc", 1
)
_value("a text of wide characters", lambda: text("a" * 50_000_000 + "\U0001f600"), 0, 1)
_value(
    "bytes that are no text",
    lambda: b"T" + struct.pack("<I", 50_000_000) + b"\xff" * 50_000_000,
    0,
    1,
)
_value("a memo at huge places", lambda: b"N" + b"p1152921504606846000\n" + put(0xFFFFFFFF), 0, 1)
_value("a full memo", lambda: b"N" + b"\x94" * 1_100_000, 1)
_value("empty dictionaries", lambda: b"(" + b"}" * 1_900_000 + b"l", 0, 1)
_value("a memo of dictionaries", lambda: b"(" + b"}\x94" * 900_000 + b"l", 0, 1)
_value("opcodes without end", lambda: b"N0" * 1_200_000, 1)
_value("dictionaries of one entry", lambda: b"(" + b"}K\x01K\x02s" * 200_000 + b"l", 0, 1)
_value("floats", lambda: b"(" + (b"G" + struct.pack(">d", 1.5)) * 700_000 + b"l", 0, 1)

# Little that stands for much: values are pushed again and again by their place in the memo

_value("laughs as a value", lambda: doubled(60), 0, 1)
_value("laughs as a key", lambda: b"}" + doubled(60) + b"Ns", 0, 1)
_value("laughs as entries", lambda: ORDERED + b"]" + doubled(60) + b"a\x85R", 0, 1)
_value("laughs as sizes", lambda: b"ctorch\nSize\n" + doubled(60) + b"\x85R", 1)
_value("laughs as a set", lambda: b"cbuiltins\nset\n" + doubled(60) + b"\x85R", 0, 1)
_value("laughs as a name", lambda: doubled(60) + text("x") + b"\x93", 1, 4)
_value(
    "laughs as a storage's key", lambda: tensor(held=storage().replace(text("0"), doubled(60))), 1
)
_value("laughs as arguments", lambda: REBUILD + doubled(60) + b"R", 1)
_value("a list that holds itself", lambda: b"]" + put(5) + get(5) + b"a", 0, 1)
_value("a dictionary that holds itself", lambda: b"}" + put(5) + text("k") + get(5) + b"s", 0, 1)

_MILLION = b"(" + b"K\x01" * MANY + b"t" + put(9) + b"0"


def _calls(function: bytes, arguments: bytes = b"", times: int = 200_000) -> bytes:
    """Return calls of one function with a million arguments, or with what `arguments` push."""
    call = get(8) + (arguments or get(9)) + b"R"
    return _MILLION + function + put(8) + b"0" + again(call, times)


_value("calls of a class with many arguments", lambda: _calls(b"cargparse\nNamespace\n"), 1, 4)
_value(
    "calls of a tensor with many arguments",
    lambda: _calls(b"ctorch._utils\n_rebuild_sparse_tensor\n", times=99_000),
    1,
)
_value("copies of sizes", lambda: _calls(b"ctorch\nSize\n", get(9) + b"\x85"), 1)
_value("bytes of many texts", lambda: _calls(b"cbuiltins\nbytearray\n"), 1)
_value(
    "copies of a dictionary",
    lambda: (
        b"}("
        + b"".join(b"J" + struct.pack("<i", k) + b"N" for k in range(300_000))
        + b"u"
        + put(6)
        + b"0"
        + ORDERED
        + put(8)
        + b"0("
        + (get(8) + get(6) + b"\x85R") * 200_000
        + b"l"
    ),
    1,
)


@attack(0, 1, 4)
def long_names_of_functions(folder: Path) -> str:
    """Join two texts to a name, again and again."""
    name = text("m" * 20_000_000) + put(1) + b"0" + text("n" * 20_000_000) + put(2) + b"0"
    return _zip(
        folder,
        state_dict(
            ("fc.weight", tensor()),
            ("odd", name + again(get(1) + get(2) + b"\x93", 100_000) + b"N"),
        ),
    )


@attack(1, 4)
def many_names_of_functions(folder: Path) -> str:
    """Ask for more names than anybody would read."""
    names = b"".join(b"cm%d\nn\n0" % k for k in range(300_000))
    return _zip(folder, state_dict(("fc.weight", tensor()), ("odd", names + b"N")))


@attack(1, 4)
def names_with_escapes(folder: Path) -> str:
    """Ask for a name that would clear the terminal, or turn its text around."""
    return _zip(folder, state_dict(("odd", b"c\x1b[2J\x1b]0;owned\x07\nn\xe2\x80\xae\n)R")))


@attack(1)
def keys_that_collide(folder: Path) -> str:
    """Give numbers as keys whose hashes are all the same."""
    prime = (1 << 61) - 1
    keys = b"".join(number(1 + k * prime) + b"N" for k in range(60_000))
    return _zip(folder, state_dict(("odd", b"}(" + keys + b"u")))


@attack(1)
def keys_that_probe_long(folder: Path) -> str:
    """Give small numbers as keys that differ in their highest bits only."""
    keys = b"".join(number(k << 40) + b"N" for k in range(300_000))
    return _zip(folder, state_dict(("odd", b"}(" + keys + b"u")))


@attack(1)
def marks_alone(folder: Path) -> str:
    """Give a file of forty million marks."""
    (folder / "marks.bin").write_bytes(b"(" * 40_000_000)
    return "inspect marks.bin"


@attack(1, 4)
def many_pickles(folder: Path) -> str:
    """Put very many pickles one after the other."""
    (folder / "a.pt").write_bytes(b"\x80\x02N." * 2_000_000)
    return "inspect a.pt"


@attack(1)
def lines_without_end(folder: Path) -> str:
    """End no line of a text pickle."""
    (folder / "a.pt").write_bytes(b"S'" + b"a" * 50_000_000)
    return "inspect a.pt"


@attack(1)
def many_lines(folder: Path) -> str:
    """Give numbers as lines of text."""
    (folder / "a.pt").write_bytes(b"I1\n0" * 3_000_000)
    return "inspect a.pt"


# Tensors

SHAPES: dict[str, tuple[list[int], list[int], int]] = {
    "65 axes": ([1] * 65, [1] * 65, 0),
    "no numbers, huge": ([0, 1 << 62], [1, 1], 0),
    "many numbers": ([1 << 61], [1], 0),
    "more numbers than any": ([1 << 70, 1 << 70], [1, 1], 0),
    "a negative size": ([-4], [1], 0),
    "a negative stride": ([4], [-1], 3),
    "a negative offset": ([4], [1], -4),
    "an overlap": ([1 << 20, 1 << 20], [0, 0], 0),
    "a huge stride": ([2], [1 << 62], 0),
    "a huge offset": ([4], [1], 1 << 63),
    "fewer strides": ([2, 2], [1], 0),
    "a number beyond": ([5], [1], 0),
    "a number beyond by its stride": ([2, 2], [3, 1], 0),
    "sizes of many digits": ([1 << 7000], [1 << 7000], 1 << 7000),
}
for _name, (_size, _stride, _offset) in SHAPES.items():
    _made = state_dict(("fc.weight", tensor(_size, _stride, offset=_offset)))
    add(f"a tensor with {_name}", lambda f, p=_made: _zip(f, p), 0, 1)

STORAGES: dict[str, bytes] = {
    "that claims too much": storage(count=1 << 40),
    "of a negative size": storage(count=-4),
    "that is missing": storage("1"),
    "outside": storage("../../../etc/passwd"),
    "of an unknown kind": storage(kind="Size"),
    "of bytes": storage(kind="UntypedStorage"),
    "of packed numbers": storage(kind="QUInt4x2Storage"),
    "that is no tuple": b"NQ",
    "with too little": text("storage") + b"\x85Q",
    "of a list as its key": storage().replace(text("0"), b"]"),
}
for _name, _held in STORAGES.items():
    _made = state_dict(("fc.weight", tensor(held=_held)))
    add(f"a storage {_name}", lambda f, p=_made: _zip(f, p), 0, 1, 4)


@attack(0, 1)
def fifty_thousand_tensors(folder: Path) -> str:
    """Make tensors from the memo, for a few bytes each."""
    return _many_tensors(folder, 49_999, lambda number: f"l{number}.weight")


@attack(1)
def too_many_tensors(folder: Path) -> str:
    """Make more tensors than any model has."""
    return _many_tensors(folder, 100_000, lambda number: f"l{number}.weight")


@attack(0, 1)
def tensors_that_look_averaged(folder: Path) -> str:
    """Give copies by moving averages that could belong to any of ten thousand parts."""
    names = ["ema.w", "ema.b", *(f"part{number}.w" for number in range(10_000))]
    return _many_tensors(folder, len(names), names.__getitem__)


@attack(0, 1)
def names_of_many_parts(folder: Path) -> str:
    """Give long names of many parts, one of which could be a copy's."""
    names = ["ema." + "a." * 60 + "w", *("a." * 60 + f"b{number}.w" for number in range(10_000))]
    return _many_tensors(folder, len(names), names.__getitem__)


def _many_tensors(folder: Path, count: int, name: Callable[[int], str]) -> str:
    return _zip(folder, many_tensors(count, name))


def many_tensors(count: int, name: Callable[[int], str]) -> bytes:
    """Return the pickle of tensors that share function and arguments."""
    shared = REBUILD + put(1) + b"0" + storage(count=4) + put(2) + b"0" + numbers([2, 2]) + put(3)
    shared += b"0" + numbers([1, 1]) + put(4) + b"0" + ORDERED + b")R" + put(5) + b"0"
    made = get(1) + b"(" + get(2) + b"K\x00" + get(3) + get(4) + b"\x89" + get(5) + b"tR"
    entries = b"".join(text(name(k)) + made for k in range(count))
    return PROTOCOL_2 + shared + b"}(" + entries + b"u."


@attack(0, 1)
def tensors_that_each_show_the_whole_file(folder: Path) -> str:
    """Make many views of all numbers of the file, each of another shape."""
    return _views(folder, lambda k: (numbers([1_000_000 - k]), numbers([1])))


@attack(0, 1)
def two_numbers_far_apart(folder: Path) -> str:
    """Make many views of two numbers with all others between them."""
    return _views(folder, lambda k: (numbers([2]), numbers([1_000_000 - k])))


def _views(folder: Path, place: Callable[[int], tuple[bytes, bytes]]) -> str:
    held = storage(count=1_000_001) + put(2) + b"0"
    entries = []
    for k in range(20_000):
        size, stride = place(k)
        view = REBUILD + b"(" + get(2) + b"K\x00" + size + stride + b"\x89" + ORDERED + b")RtR"
        entries.append(text(f"l{k}.weight") + view)
    pickled = PROTOCOL_2 + held + b"}(" + b"".join(entries) + b"u."
    torch_zip(folder / "a.pt", pickled, {"data/0": b"\0" * 4_000_004})
    return "inspect a.pt"


@attack(0, 1)
def a_tensor_of_a_device_that_has_no_values(folder: Path) -> str:
    """Copy a tensor without values to a device."""
    meta = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n" + numbers([4, 4])
    meta += numbers([4, 1]) + b"\x89tR"
    copied = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(" + meta
    copied += b"ctorch\nfloat32\n" + text("xla:0") + b"\x89tR"
    return _zip(folder, state_dict(("fc.weight", copied)))


@attack(0, 1)
def copies_of_copies_of_a_tensor(folder: Path) -> str:
    """Copy a tensor to a device, a hundred thousand times in each other."""
    function = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n"
    made = (function + put(1) + b"0") + b"".join([get(1) + b"("] * 90_000) + tensor()
    made += (b"ctorch\nfloat32\n" + text("xla:0") + b"\x89tR") * 90_000
    return _zip(folder, state_dict(("fc.weight", made)))


@attack(0, 1)
def numbers_of_all_kinds(folder: Path) -> str:
    """Read a storage of another type than its tensor's."""
    v3 = (
        b"ctorch._utils\n_rebuild_tensor_v3\n("
        + storage(kind="UntypedStorage", count=16)
        + b"K\x00"
    )
    v3 += numbers([2]) + numbers([1]) + b"\x89" + ORDERED + b")Rctorch\n%s\nNtR"
    kinds = [b"float64", b"bool", b"complex64", b"quint8", b"float8_e5m2", b"bits16", b"uint64"]
    entries = [(f"fc{k}.weight", v3 % kind) for k, kind in enumerate(kinds)]
    return _zip(folder, state_dict(*entries))


# Trees around the tensors


@attack(1)
def long_paths(folder: Path) -> str:
    """Nest two thousand state dicts below names of 200,000 letters each."""
    inner = b"}" + b"".join(
        text(str(k)) + b"}" + text("w") + tensor() + b"ss" for k in range(2_000)
    )
    opened = b"".join(b"}" + text("k" * 200_000) for _ in range(60))
    return _zip(folder, PROTOCOL_2 + opened + inner + b"s" * 60 + b".")


@attack(1)
def a_long_name(folder: Path) -> str:
    """Give a tensor a name of five million letters."""
    return _zip(folder, state_dict(("w" * 5_000_000 + ".weight", tensor())))


@attack(1)
def many_state_dicts(folder: Path) -> str:
    """Give very many state dicts to choose from."""
    return _dictionaries(folder, 80_000, "net{}")


@attack(0, 1)
def many_averaged_copies(folder: Path) -> str:
    """Give very many copies by moving averages besides one model."""
    return _dictionaries(folder, 60_000, "ema{0}.ema", first="net")


def _dictionaries(folder: Path, count: int, name: str, first: str = "") -> str:
    shared = tensor() + put(1) + b"0"
    names = [*([first] if first else []), *(name.format(k) for k in range(count))]
    entries = b"".join(text(n) + b"}" + text("fc.weight") + get(1) + b"s" for n in names)
    return _zip(folder, PROTOCOL_2 + shared + b"}(" + entries + b"u.")


ODD_NAMES = {
    "an escape": "fc\x1b[31m.weight",
    "a line": "fc\nerror: all is well",
    "a return": "fc\rerror",
    "text from right to left": "fc\u202eweight",
    "half a character": "fc\ud800.weight",
    "nothing": "",
    "dots": "...",
    "a folder": "../../x",
    "a null": "a\0b",
    "markup": "[red]fc[/red].weight",
    "no assigned character": "\U0010ffff\ufdd0",
}
for _name, _odd in ODD_NAMES.items():
    _made = state_dict((_odd, tensor()), ("fc.weight", tensor((2, 2), (2, 1))))
    add(f"a tensor named with {_name}", lambda f, p=_made: _zip(f, p), 0, 1)
    _made = PROTOCOL_2 + b"}" + text(_odd) + state_dict(("fc.weight", tensor()))[2:-1] + b"s."
    add(f"a state dict named with {_name}", lambda f, p=_made: _zip(f, p), 0, 1)
    _made = state_dict(("fc.weight", tensor((2, 2), (2, 1))), (_odd, b"K\x01"))
    add(f"an entry named with {_name}", lambda f, p=_made: _zip(f, p), 0, 1)
