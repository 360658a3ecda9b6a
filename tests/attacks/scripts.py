"""TorchScript archives whose modules and code stand for much more than they are."""

from __future__ import annotations

from pathlib import Path

from tests.attacks.attack import attack
from tests.attacks.building import PROTOCOL_2, tensor, text, write_zip
from tests.attacks.pickles import get, put

_CLASS = b"c__torch__.m\nM\n"
_CODE = 'class M(Module):\n  __parameters__ = ["w"]\n  __buffers__ = []\n'


def _module(attributes: bytes) -> bytes:
    """Return the opcodes of a module with a state."""
    return _CLASS + b")\x81}(" + attributes + b"ub"


def _archive(folder: Path, model: bytes, code: str = _CODE) -> str:
    records = {
        "a/data.pkl": PROTOCOL_2 + model + b".",
        "a/data/0": b"\0" * 16,
        "a/constants.pkl": b"\x80\x02).",
        "a/code/__torch__/m.py": code.encode(),
    }
    write_zip(folder / "a.pt", records, deflated="/code/")
    return "inspect a.pt"


_LEAF = _module(text("w") + tensor([2, 2], [2, 1]))


@attack(0, 1)
def a_module_that_is_fine(folder: Path) -> str:
    """Show that the others fail for what is wrong with them."""
    return _archive(folder, _LEAF)


@attack(1)
def modules_that_double(folder: Path) -> str:
    """Let each module hold the one before twice, sixty times."""
    model = _LEAF
    for level in range(60):
        model += put(level) + b"0" + _module(text("a") + get(level) + text("b") + get(level))
    return _archive(folder, model)


@attack(1)
def a_long_chain_of_modules(folder: Path) -> str:
    """Nest ten thousand modules."""
    model = _CLASS + put(0) + b"0"
    model += (get(0) + b")\x81}" + text("a")) * 10_000 + _LEAF + b"sb" * 10_000
    return _archive(folder, model)


@attack(1)
def a_large_module_in_many_places(folder: Path) -> str:
    """Hold one module of a hundred thousand attributes ten thousand times."""
    attributes = b"".join(text(f"x{k}") + b"N" for k in range(100_000))
    model = _module(attributes) + put(1) + b"0"
    model += _module(b"".join(text(f"m{k}") + get(1) for k in range(10_000)))
    return _archive(folder, model)


@attack(1)
def long_names_in_many_places(folder: Path) -> str:
    """Hold a parameter of a name of a million letters in a thousand places."""
    name = "w" * 1_000_000
    model = _module(text(name) + tensor([2, 2], [2, 1])) + put(1) + b"0"
    model += _module(b"".join(text(f"m{k}") + get(1) for k in range(1_000)))
    return _archive(folder, model, _CODE.replace('"w"', f'"{name}"'))


@attack(1)
def code_that_inflates(folder: Path) -> str:
    """Compress 256 megabytes of spaces to a quarter of one."""
    return _archive(folder, _LEAF, " " * (1 << 28))


@attack(0, 1)
def code_of_empty_lines(folder: Path) -> str:
    """Give a class of fifteen million empty lines before its parameters."""
    return _archive(folder, _LEAF, "class M(Module):\n" + "\n" * 15_000_000 + "  __parameters__")


@attack(0, 1)
def code_of_spaces(folder: Path) -> str:
    """Give a class of long lines of spaces before its parameters."""
    return _archive(folder, _LEAF, "class M(Module):\n" + (" " * 5_000 + "\n") * 3_000)


@attack(1)
def code_of_many_parameters(folder: Path) -> str:
    """List four million parameters."""
    listed = ",".join('"ab"' for _ in range(3_000_000))
    return _archive(folder, _LEAF, f"class M(Module):\n  __parameters__ = [{listed}]\n")


@attack(1)
def code_of_many_classes(folder: Path) -> str:
    """Define nine hundred thousand classes."""
    return _archive(folder, _LEAF, "class M(Module):\n" * 900_000)


@attack(0, 1)
def code_of_wide_characters(folder: Path) -> str:
    """Give fifteen megabytes of code in which one character takes four bytes."""
    return _archive(folder, _LEAF, _CODE + "#" * 15_000_000 + "\U0001f600")


@attack(1)
def code_that_is_no_deflated_text(folder: Path) -> str:
    """Damage compressed code."""
    _archive(folder, _LEAF)
    path = folder / "a.pt"
    content = path.read_bytes()
    place = content.index(b"m.py") + 6
    path.write_bytes(content[:place] + b"\xff" * 8 + content[place + 8 :])
    return "inspect a.pt"


@attack(1)
def a_state_that_is_no_dictionary(folder: Path) -> str:
    """Give a module a list as its state."""
    return _archive(folder, _CLASS + b")\x81]b")


@attack(1, 4)
def a_module_of_another_class(folder: Path) -> str:
    """Name a class that is no part of the archive."""
    return _archive(folder, b"cos\nsystem\n" + text("mkdir canary") + b"\x85R")
