"""Further files of all kinds: rare opcodes, odd containers, numbers beyond all, formulas."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.attacks.attack import add, attack
from tests.attacks.building import (
    MAKE_CANARY,
    PROTOCOL_2,
    entry,
    number,
    safetensors,
    state_dict,
    tensor,
    text,
    torch_zip,
    write_zip,
)
from tests.attacks.data_files import npy, raw_npy, scene
from tests.attacks.programs import LINEAR, meta, named, node, program, write
from tests.attacks.texts import clients

_NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
_CANARY = text("os") + text("mkdir")
_DICT = b"ccollections\nOrderedDict\n)R"
_PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"

PICKLES: dict[str, bytes] = {
    "a dictionary in itself": b"}q\0" + text("a") + b"h\0s" + text("w") + tensor() + b"s",
    "a list in itself, as a state": b"}" + text("state_dict") + b"]q\0h\0as",
    "parameters in parameters": (
        (b"}" + text("w") + (_PARAMETER + b"(") * 3_000 + tensor())
        + ((b"\x89" + _DICT + b"tR") * 3_000 + b"s")
    ),
    "a state that names a class": (
        b"}" + text("w") + _DICT + b"}" + text("__class__") + b"cos\nsystem\nsbs"
    ),
    "a function by its names": b"}" + text("w") + _CANARY + b"\x93" + text("canary") + b"\x85Rs",
    "a function by numbers": b"}" + text("w") + number(1) + number(2) + b"\x93s",
    "an instance": b"}" + text("w") + b"(" + text("canary") + b"ios\nmkdir\ns",
    "an object": b"}" + text("w") + b"(cos\nmkdir\n" + text("canary") + b"os",
    "a new object with names": b"}" + text("w") + b"cos\nmkdir\n)}\x92s",
    "numbers of registered functions": b"}" + text("w") + b"\x84\xff\xff\xff\x7fs",
    "buffers that are elsewhere": b"}" + text("w") + b"\x97\x98s",
    "an endless array of bytes": b"}" + text("w") + b"\x96" + struct.pack("<Q", 1 << 62),
    "endless bytes": b"}" + text("w") + b"\x8e" + struct.pack("<Q", (1 << 64) - 1),
    "an endless frame": b"\x95" + struct.pack("<Q", (1 << 63) - 1) + b"}",
    "a name that is told by a number": b"}" + text("w") + b"P7\ns",
    "a hook of a tensor": (
        b"}" + text("w") + tensor().replace(_DICT + b"tR", b"]" + MAKE_CANARY + b"atR") + b"s"
    ),
}  # fmt: skip
for _name, _steps in PICKLES.items():
    add(
        f"a pickle of {_name}",
        lambda f, s=_steps: _saved(f, PROTOCOL_2 + s + b"."),
        *(0, 1, 4),
    )


def _saved(folder: Path, pickled: bytes) -> str:
    torch_zip(folder / "a.pt", pickled)
    return "inspect a.pt"


# Containers


@attack(1, 4)
def a_tar_of_old_times(folder: Path) -> str:
    """Write what torch wrote before it had a format: a tar file of pickles."""
    with tarfile.open(folder / "a.pt", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            content = PROTOCOL_2 + MAKE_CANARY + b"."
            entry_of = tarfile.TarInfo(name)
            entry_of.size = len(content)
            archive.addfile(entry_of, io.BytesIO(content))
    return "inspect a.pt"


@attack(1)
def a_packed_file_of_zeros(folder: Path) -> str:
    """Write zeros that a reader of packed files would unpack to a gigabyte."""
    packed = gzip.compress(b"\0" * 1_000_000) * 1_000
    (folder / "a.pt").write_bytes(packed)
    return "inspect a.pt"


@attack(0, 1)
def an_archive_in_the_comment_of_another(folder: Path) -> str:
    """Let readers differ in which of two directories they find."""
    outer, inner = folder / "a.pt", folder / "b.pt"
    torch_zip(inner, PROTOCOL_2 + b"}" + text("w") + MAKE_CANARY + b"s.")
    torch_zip(outer, state_dict(("w", tensor())))
    hidden = inner.read_bytes()[:60_000]
    content = bytearray(outer.read_bytes() + hidden)
    place = len(content) - len(hidden) - 2
    content[place : place + 2] = struct.pack("<H", len(hidden))
    outer.write_bytes(content)
    inner.unlink()
    return "inspect a.pt"


@attack(0, 1)
def an_end_of_eight_bytes_that_is_its_own_place(folder: Path) -> str:
    """Let the place of the end be said to be where the place is said."""
    path = torch_zip(folder / "a.pt", state_dict(("w", tensor())))
    content = path.read_bytes()
    place = len(content) - 22
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, place, 1)
    path.write_bytes(content[:place] + locator + content[place:])
    return "inspect a.pt"


HEADERS: dict[str, Any] = {
    "of spaces": b'{"w":' + json.dumps(entry([4], [0, 16])).encode() + b"}" + b" " * 90_000_000,
    "of flags for lengths": {"w": entry([True, 4], [0, 16])},
    "of fractions for lengths": {"w": {**entry([4], [0, 16]), "shape": [4.0]}},
    "of texts for places": {"w": {**entry([4], [0, 16]), "data_offsets": ["0", "16"]}},
    "of three places": {"w": {**entry([4], [0, 16]), "data_offsets": [0, 8, 16]}},
    "of places beyond all": {"w": entry([1 << 61], [0, 1 << 63])},
    "of lengths whose product is small again": {"w": entry([1 << 32, 1 << 32, 4], [0, 16])},
    "of a kind that is a list": {"w": {**entry([4], [0, 16]), "dtype": ["F32"]}},
    "of kinds of half a byte": {"w": entry([32], [0, 16], "F4")},
    "of equal names": b'{"w":%s,"w":%s}' % ((json.dumps(entry([4], [0, 16])).encode(),) * 2),
    "of notes that are no texts": {"__metadata__": {"a": [1]}, "w": entry([4], [0, 16])},
    "of a record that is deep": {
        "__metadata__": {"fedmerge": "[" * 100_000},
        "w": entry([4], [0, 16]),
    },
    "of a record that is no number": {
        "__metadata__": {"fedmerge": '{"schema": NaN, "options": {"seed": 1e999}}'},
        "w": entry([4], [0, 16]),
    },
}
for _name, _header in HEADERS.items():
    for _command in ("inspect", "verify"):
        add(
            f"{_command} of a header {_name}",
            lambda f, h=_header, c=_command: _headed(f, h, c),
            *(0, 1, 2, 3, 4),
        )


def _headed(folder: Path, header: Any, command: str) -> str:
    safetensors(folder / "a.safetensors", header, _NUMBERS)
    return f"{command} a.safetensors"


# Data

_FORMULA = b"{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os').mkdir('canary'),)}"
ARRAYS: dict[str, bytes] = {
    "a formula": raw_npy(_FORMULA, _NUMBERS),
    "deep tuples": raw_npy(b"(" * 9_000, _NUMBERS),
    "fields in fields": npy(np.zeros(4, np.float32), descr=[("a", [("b", "<f4")])]),
    "characters without end": npy(np.zeros(4, np.float32), descr="<U999999999"),
    "empty places without end": npy(np.zeros(4, np.float32), descr="|V2147483647"),
    "dates": npy(np.zeros(4, np.float32), descr="<M8[s]", shape=(2,)),
    "a flag for a length": npy(np.zeros(4, np.float32), shape=(True,)),
    "a length below nothing": npy(np.zeros(4, np.float32), shape=(-4,)),
    "lengths whose product is small again": npy(np.zeros(4, np.float32), shape=(1 << 33, 1 << 31)),
    "many axes": npy(np.zeros(1, np.float32), shape=(1,) * 2_000),
}
for _name, _array in ARRAYS.items():
    add(f"an array of {_name}", lambda f, a=_array: scene(f, a), 1, 2)


# Plans and counts


def _option(folder: Path, option: str, value: Any, change: Callable[[str], str] = str) -> str:
    (folder / "t.json").write_text(change(json.dumps(value)))
    return f"match {clients(folder)} -o x.pt {option} t.json"


_LAYERS = {"fc1.weight": ["g", 2], "fc2.weight": [2, "g"]}


def _planned(**changes: Any) -> dict[str, Any]:
    return {"schema": 1, "format": 1, "tensors": _LAYERS, "groups": ["g"], **changes}


def _second(*axes: Any) -> dict[str, Any]:
    return _planned(tensors={**_LAYERS, "fc2.weight": list(axes)})


def _deep(kind: str, levels: int) -> Any:
    layout: Any = "g"
    for _ in range(levels):
        layout = {kind: [layout, 1]}
    return layout


PLANS: dict[str, dict[str, Any]] = {
    "a size beyond all": _second(10**30, "g"),
    "a size below nothing": _second(-1, "g"),
    "a product beyond all": _second(2, {"prod": ["g", 1 << 62]}),
    "a hundred thousand parts": _second(2, {"cat": ["g"] * 100_000}),
    "products in products": _second(2, _deep("prod", 25)),
    "parts in parts": _second(2, _deep("cat", 60)),
    "very many axes": _second(*["g"] * 100_000),
    "very many tensors": _planned(tensors={**_LAYERS, **{f"t{k}": ["g"] for k in range(200_000)}}),
    "very many groups": _planned(groups=[f"g{k}" for k in range(200_000)]),
    "one group many times": _planned(groups=["g"] * 200_000),
    "many equal widths": _planned(same_width=[["g"] * 1_000] * 200),
    "a width beyond all": _planned(groups=[{"name": "g", "width": 10**18}]),
    "tensors that are not there": _planned(tensors={"\x1b[2J": ["g"], **_LAYERS}),
    "norms of nothing": _planned(
        norms=[{"producer": "../a", "mean": "m", "variance": "v", "eps": 1e30}]
    ),
}  # fmt: skip
for _name, _plan in PLANS.items():
    add(
        f"a plan of {_name}",
        lambda f, p=_plan: _option(f, "--plan", p),
        *((0,) if _name == "products in products" else (1, 2, 3)),  # once one, it is right
    )

COUNTS: dict[str, Any] = {
    "beyond all": {"a": [10**400, 1], "b": [1, 1]},
    "that add up beyond all": {"a": [1e308, 1e308], "b": [1e308, 1e308]},
    "below nothing": {"a": [-1, 2], "b": [1, 1]},
    "that are nothing": {"a": [0, 0], "b": [0, 0]},
    "of a million classes": {"a": [1] * 1_000_000, "b": [1] * 1_000_000},
    "that are flags": {"a": [True, False], "b": [1, 1]},
    "of strangers": {"../a": [1, 1], "\x1b[2J": [1, 1]},
}
for _name, _counts in COUNTS.items():
    add(
        f"counts {_name}",
        lambda f, c=_counts: _option(f, "--class-counts", c),
        *((0, 1, 2, 3) if _name == "that are nothing" else (1, 2, 3)),
    )


# Graphs

_WEIGHT = {
    "path_name": "weight_0",
    "is_param": True,
    "use_pickle": False,
    "tensor_meta": meta([4, 4]),
}
_RUN = "__import__('os').mkdir('canary')"


@attack(0, 1, 2, 3, 4)
def lengths_that_are_formulas(folder: Path) -> str:
    """Give lengths as formulas, which whoever evaluates them runs."""
    described = program([LINEAR], result="h")
    values = described["graph_module"]["graph"]["tensor_values"]
    formula = {"as_expr": {"expr_str": _RUN, "hint": {"as_int": 2}}}
    values["x"]["sizes"][0] = formula
    described["graph_module"]["graph"]["sym_int_values"] = {"s0": formula}
    described["range_constraints"] = {_RUN: {"min_val": 0, "max_val": 1}, "s0": {"min_val": "x"}}
    described["guards_code"] = [_RUN]
    return write(folder, described)


@attack(0, 1, 2, 3, 4)
def formulas_of_great_powers(folder: Path) -> str:
    """Give a length as a power that nobody can write down."""
    described = program([LINEAR], result="h")
    power = {"as_expr": {"expr_str": "9**9**9**9", "hint": None}}
    described["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0] = power
    return write(folder, described)


@attack(1, 2, 3, 4)
def constants_that_run_code(folder: Path) -> str:
    """Let a constant be a pickle, an object of a class, and a file elsewhere."""
    constants = {
        "c": {**_WEIGHT, "path_name": "tensor_0", "use_pickle": True},
        "o": {**_WEIGHT, "path_name": "custom_obj_0", "use_pickle": True, "tensor_meta": None},
        "e": {**_WEIGHT, "path_name": "../../../../etc/passwd"},
    }
    hostile = PROTOCOL_2 + MAKE_CANARY + b"."
    described = program([LINEAR], result="h")
    specs = described["graph_module"]["signature"]["input_specs"]
    specs += [
        {"tensor_constant": {"arg": {"name": name}, "tensor_constant_name": name}}
        for name in constants
    ]
    inputs = described["graph_module"]["graph"]["inputs"]
    inputs += [named(name) for name in constants]
    records = {
        "data/constants/model_constants_config.json": json.dumps({"config": constants}).encode(),
        "data/constants/tensor_0": hostile,
        "data/constants/custom_obj_0": hostile,
    }
    return write(folder, described, records=records)


@attack(1, 2, 3, 4)
def an_op_that_is_a_formula(folder: Path) -> str:
    """Name no op but a formula of Python's."""
    return write(folder, program([LINEAR, node(f"torch.ops.aten.{_RUN}", named("h"))]))


@attack(1, 2, 3, 4)
def an_op_by_a_long_way(folder: Path) -> str:
    """Reach for a function of Python's by the names of torch's modules."""
    target = "torch.ops.aten.__class__.__base__.__subclasses__"
    return write(folder, program([LINEAR, node(target, named("h"))]))


# TorchScript


def _script(folder: Path, code: str, records: dict[str, bytes] | None = None) -> str:
    module = b"c__torch__.m\nM\n)\x81}(" + text("w") + tensor([2, 2], [2, 1]) + b"ub"
    content = {
        "a/data.pkl": PROTOCOL_2 + module + b".",
        "a/data/0": b"\0" * 16,
        "a/constants.pkl": b"\x80\x02).",
        "a/code/__torch__/m.py": code.encode(),
        **(records or {}),
    }
    write_zip(folder / "a.pt", content)
    return "inspect a.pt"


_CODE = 'class M(Module):\n  __parameters__ = ["w"]\n  __buffers__ = []\n'
SCRIPTS: dict[str, str] = {
    "deep brackets": _CODE + "  x = " + "(" * 100_000 + ")" * 100_000 + "\n",
    "a deep list of names": 'class M(Module):\n  __parameters__ = ' + "[" * 50_000 + "\n",
    "quotes without end": 'class M(Module):\n  __parameters__ = ["' + "w" * 1_000_000,
    "names with escapes": 'class M(Module):\n  __parameters__ = ["\\x1b[2J", ]\n',
    "one name a hundred thousand times": (
        'class M(Module):\n  __parameters__ = [' + '"w", ' * 100_000 + "]\n"
    ),
    "classes of one name": _CODE * 20_000,
}  # fmt: skip
for _name, _text in SCRIPTS.items():
    add(f"a script of {_name}", lambda f, t=_text: _script(f, t), 0, 1)


@attack(0, 1, 4)
def a_script_with_hostile_constants(folder: Path) -> str:
    """Hide code in the other pickles of an archive."""
    hostile = PROTOCOL_2 + MAKE_CANARY + b"."
    others = ("constants.pkl", "bytecode.pkl", "attributes.pkl", "extra/a", "mobile_debug.pkl")
    return _script(folder, _CODE, {f"a/{name}": hostile for name in others})
