"""Little that stands for much work: what is read, copied or looked for again and again."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.attacks.attack import add, attack
from tests.attacks.building import (
    PROTOCOL_2,
    Record,
    entry,
    lying_zip,
    number,
    safetensors,
    state_dict,
    tensor,
    text,
    torch_zip,
)
from tests.attacks.pickles import get, put
from tests.attacks.programs import LINEAR, meta, program, write
from tests.attacks.texts import clients, record

_PICKLE = state_dict(("fc.weight", tensor([2, 2], [2, 1])))

# A function that is called by the one for tensors of subclasses, whose arguments lie deeper.

_LARGE: dict[str, tuple[bytes, bytes]] = {
    "dictionaries": (
        b"ccollections\nOrderedDict\n",
        b"}(" + b"".join(number(k) + b"N" for k in range(150_000)) + b"u",
    ),
    "sizes": (b"ctorch\nSize\n", b"(" + b"K\x01" * 1_000_000 + b"t"),
    "sets": (b"cbuiltins\nset\n", b"](" + b"K\x01" * 300_000 + b"e"),
}


def _copies(folder: Path, function: bytes, large: bytes) -> str:
    made = large + put(1) + b"0" + function + put(2) + b"0"
    made += b"ctorch._tensor\n_rebuild_from_type_v2\n" + put(3) + b"0ctorch\nTensor\n" + put(4)
    call = get(3) + b"(" + get(2) + get(4) + get(1) + b"\x85}tR"
    odd = made + b"0(" + call * 60_000 + b"l"
    torch_zip(folder / "a.pt", state_dict(("fc.weight", tensor()), ("odd", odd)))
    return "inspect a.pt"


for _name, (_function, _content) in _LARGE.items():
    add(
        f"copies of {_name} by the function of subclasses",
        lambda f, a=_function, b=_content: _copies(f, a, b),
        1,
    )


@attack(1)
def weights_that_are_one_archive_with_a_large_directory(folder: Path) -> str:
    """Let a hundred pickled weights be one archive, whose directory of odd names is large."""
    names = [b"%05d" % k + b"\xff" * 65_000 for k in range(480)]
    records = [Record(name, at=0, extra=b"\0" * 65_000) for name in names]
    inner = folder / "inner"
    lying_zip(inner, [Record(b"a/data.pkl", _PICKLE), Record(b"a/data/0", b"\0" * 16), *records])
    content = inner.read_bytes()
    inner.unlink()
    weight = {"path_name": "w", "use_pickle": True, "is_param": True, "tensor_meta": meta([4, 4])}
    config = {f"l{k}.weight": weight for k in range(100)}
    return write(folder, program([LINEAR]), config=config, records={"data/weights/w": content})


@attack(1)
def as_many_names_of_the_greatest_length(folder: Path) -> str:
    """Give very many tensors names of a thousand letters."""
    names = ["a." * 60 + "n" * 860 + f"{k}.weight" for k in range(49_000)]
    header = {name: entry([1], [4 * k, 4 * k + 4]) for k, name in enumerate(names)}
    safetensors(folder / "a.safetensors", header, b"\0" * (4 * len(names)))
    return "inspect a.safetensors"


@attack(1)
def many_ways_to_the_same_place(folder: Path) -> str:
    """Let the parts of a dotted path be put together in a million ways."""
    inner = b"}" + text("w") + tensor() + b"s"
    for k in range(24):
        inner = b"}" + text("a") + inner + put(k) + b"s" + text("a.a") + get(k) + b"s"
    torch_zip(folder / "a.pt", PROTOCOL_2 + inner + b".")
    return "inspect a.pt --key " + "a." * 60 + "q"


@attack(3)
def clients_of_very_many_single_numbers(folder: Path) -> str:
    """Merge clients whose names are compared with each other's."""
    header = {f"z{k}": entry([], [4 * k, 4 * k + 4]) for k in range(49_000)}
    for name in ("a.safetensors", "b.safetensors"):
        safetensors(folder / name, header, b"\0" * (4 * len(header)))
    return "match a.safetensors b.safetensors -o x.pt"


@attack(1, 2)
def a_record_with_a_seed_beyond_all(folder: Path) -> str:
    """Let a record give a seed that no generator of random numbers takes."""
    clients(folder)
    torch_zip(folder / "g.pt", _PICKLE)
    (folder / "g.pt.json").write_text(json.dumps(record(seed=10**30)))
    return "match a.safetensors b.safetensors --config g.pt.json -o x.pt"


def _seeded(folder: Path) -> str:
    return f"match {clients(folder)} --seed {10**30} -o x.pt"


add("a seed beyond all on the command line", _seeded, 2)


@attack(0, 1)
def sizes_of_eight_bytes_that_are_looked_for_in_vain(folder: Path) -> str:
    """Fill the extra fields of a thousand records with parts that are none."""
    extra = struct.pack("<2H", 2, 0) * 16_000
    odd = [Record(b"%d" % k, claimed=0xFFFFFFFF, at=0, extra=extra) for k in range(990)]
    lying_zip(
        folder / "a.pt", [Record(b"a/data.pkl", _PICKLE), Record(b"a/data/0", b"\0" * 16), *odd]
    )
    return "inspect a.pt"
