"""Pickled modules that would run code, go round in circles, or stand for very much."""

from __future__ import annotations

from pathlib import Path

from tests.attacks.attack import add, attack
from tests.attacks.building import MAKE_CANARY, PROTOCOL_2, tensor, text, torch_zip
from tests.attacks.pickles import get, put

LINEAR = b"ctorch.nn.modules.linear\nLinear\n"


def entries(*pairs: tuple[str, bytes]) -> bytes:
    """Return the opcodes of a dictionary."""
    return b"}" + b"".join(text(name) + value + b"s" for name, value in pairs)


def module(
    parameters: bytes = b"}",
    parts: bytes = b"}",
    *more: tuple[str, bytes],
    kind: bytes = LINEAR,
    at: int = 100,
) -> bytes:
    """Return the opcodes of a module that the memo has at a place."""
    state = (("_parameters", parameters), ("_buffers", b"}"), ("_modules", parts), *more)
    return kind + b")\x81" + put(at) + entries(*state) + b"b"


WEIGHT = entries(("weight", tensor()))
HOSTILE = {
    "with code as an attribute": module(WEIGHT, b"}", ("extra", MAKE_CANARY)),
    "with code as a parameter": module(entries(("weight", MAKE_CANARY))),
    "with code as its state": LINEAR + b")\x81" + MAKE_CANARY + b"b",
    "that calls itself": module(WEIGHT) + put(1) + b"0" + get(1) + text("canary") + b"\x85R",
    "that is a function": module(WEIGHT, kind=b"cos\nmkdir\n"),
    "made by a call": LINEAR + text("canary") + b"\x85R" + entries(("_parameters", WEIGHT)) + b"b",
    "with two states": module(WEIGHT) + entries(("_parameters", MAKE_CANARY)) + b"b",
    "that holds itself": module(WEIGHT, entries(("a", get(100)), ("b", get(100)))),
    "with numbers for parameters": module(b"K\x01"),
    "with lists for names": module(b"}]N" + b"s"),
    "whose temporary buffers are a module": module(
        WEIGHT, b"}", ("_non_persistent_buffers_set", get(100))
    ),
}
for _name, _made in HOSTILE.items():
    _pickle = PROTOCOL_2 + _made + b"."
    add(f"a module {_name}", lambda f, p=_pickle: _zip(f, p), 0, 1, 4)


def _zip(folder: Path, pickled: bytes) -> str:
    torch_zip(folder / "a.pt", pickled)
    return "inspect a.pt"


@attack(0)
def a_module_whose_code_lies_beside_it(folder: Path) -> str:
    """Name a class of a file in the folder, which makes another one when it is imported."""
    (folder / "beside.py").write_text("import os\nos.mkdir('canary')\n")
    return _zip(folder, PROTOCOL_2 + module(WEIGHT, kind=b"cbeside\nNet\n") + b".")


def _nested(levels: int, times: int, innermost: bytes) -> bytes:
    """Return modules within each other, each of which is there so many times."""
    made = innermost + put(0) + b"0"
    for level in range(levels):
        inner = [(f"m{number}", get(level)) for number in range(times)]
        made += module(b"}", entries(*inner)) + put(level + 1) + b"0"
    return made + get(levels)


@attack(1)
def modules_of_the_same_two_modules(folder: Path) -> str:
    """Share every module twice, so that the names double with each level."""
    return _zip(folder, PROTOCOL_2 + _nested(60, 2, module(WEIGHT)) + b".")


@attack(1)
def modules_without_tensors_that_are_shared(folder: Path) -> str:
    """Share modules that hold nothing, which no budget of tensors counts."""
    return _zip(folder, PROTOCOL_2 + _nested(60, 2, module()) + b".")


@attack(1)
def modules_thirty_thousand_deep(folder: Path) -> str:
    """Put modules into each other."""
    return _zip(folder, PROTOCOL_2 + _nested(30_000, 1, module(WEIGHT)) + b".")


@attack(1)
def many_modules_that_share_one(folder: Path) -> str:
    """Give a list of modules, each with the same thousand parts."""
    parts = entries(*((f"m{number}", get(0)) for number in range(1_000)))
    made = module(WEIGHT) + put(0) + b"0" + parts + put(1) + b"0"
    models = b"".join(module(b"}", get(1)) for _ in range(20_000))
    return _zip(folder, PROTOCOL_2 + made + b"(" + models + b"l.")


@attack(0, 1)
def as_many_tensors_as_are_allowed_in_modules(folder: Path) -> str:
    """Name fifty thousand tensors, each below sixty modules."""
    weights = tensor() + put(0) + b"0"
    weights += entries(*((f"w{number}", get(0)) for number in range(49_999))) + put(1) + b"0"
    made = weights + module(get(1))
    for _ in range(60):
        made = made + put(2) + b"0" + module(b"}", entries(("m", get(2))))
    return _zip(folder, PROTOCOL_2 + made + b".")
