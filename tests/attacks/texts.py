"""Texts of strangers: configurations, plans, class counts, indices of shards, records."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.attacks.attack import add, attack
from tests.attacks.building import entry, safetensors, state_dict, tensor, torch_zip

HUGE = 120_000_000  # bytes
_NUMBERS = struct.pack("<4f", 1, 2, 3, 4)


def clients(folder: Path) -> str:
    """Write two clients that could be merged."""
    for name in ("a.safetensors", "b.safetensors"):
        layers = {"fc1.weight": entry([2, 2], [0, 16]), "fc2.weight": entry([2, 2], [16, 32])}
        safetensors(folder / name, layers, _NUMBERS * 2)
    return "a.safetensors b.safetensors"


DEEP: dict[str, bytes] = {
    "deep lists": b"[" * 100_000,
    "deep lists that end": b"[" * 5_000 + b"]" * 5_000,
    "deep objects": b'{"a":' * 100_000,
    "deep lists in an option": b'{"seed": ' + b"[" * 90 + b"]" * 90 + b"}",
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
    "a null": b"\0",
    "a mark of its order": b"\xef\xbb\xbf{}",
    "wide characters": '{"seed": 1}'.encode("utf-16"),
    "a text": b'"a"',
    "a number": b"1",
    "nothing at all": b"null",
    "a list": b"[]",
    "equal names": b'{"seed": 1, "seed": 2}',
    "a number without end": b'{"seed": ' + b"9" * 200_000 + b"}",
    "no number": b'{"seed": NaN}',
    "a number beyond all": b'{"sigma": 1e999}',
    "half a character": b'{"\\ud800": 1}',
    "a name of escapes": b'{"\\u001b[2J": 1}',
    "a very long name": b'{"' + b"n" * 5_000_000 + b'": 1}',
    "a very long value": b'{"method": "' + b"n" * 5_000_000 + b'"}',
    "very many names": b"{" + b",".join(b'"n%d":1' % k for k in range(700_000)) + b"}",
}
TAKEN = {"equal names": (0, 1, 2, 3, 4)}  # of equal names the last counts, as in all of JSON
OPTIONS = ("--config", "--plan", "--class-counts")
for _name, _text in DEEP.items():
    for _option in OPTIONS:
        add(
            f"{_option} of {_name}",
            lambda f, o=_option, t=_text: _option_of(f, o, t),
            *TAKEN.get(_name, (1, 2, 3, 4)),
        )
for _option in OPTIONS:
    add(
        f"{_option} of a hundred megabytes",
        lambda f, o=_option: _option_of(f, o, b'{"a": "' + b"b" * HUGE + b'"}'),
        *(1, 2, 3, 4),
    )


def _option_of(folder: Path, option: str, text: bytes, name: str = "t.json") -> str:
    (folder / name).write_bytes(text)
    return f"match {clients(folder)} -o x.pt {option} {name}"


_LAUGHS = "class_counts: {a: &k0 {x: 1, y: [1]}, " + ", ".join(
    f"b{i}: &k{i} {{" + ", ".join(f"q{j}: *k{i - 1}" for j in range(9)) + "}" for i in range(1, 12)
)
YAMLS: dict[str, str] = {
    "deep lists": "[" * 3_000,
    "deep objects": "{a: " * 3_000,
    "deep blocks": "".join(" " * k + "- \n" for k in range(500)),
    "laughs": _LAUGHS + "}\n",
    "an alias of itself": "a: &a [*a]\n",
    "a merge of itself": "a: &a {<<: *a}\n",
    "code": "seed: !!python/object/apply:os.mkdir [canary]\n",
    "code by another name": "seed: !!python/object/new:os.mkdir [canary]\n",
    "a class": "seed: !!python/name:os.system\n",
    "an own tag": "seed: !own 1\n",
    "a date that is none": "seed: !!timestamp x\n",
    "a flag that is none": "seed: !!bool x\n",
    "a number that is none": 'seed: !!int ""\n',
    "a fraction that is none": 'seed: !!float ""\n',
    "a set": "keep: !!set {a, b}\n",
    "an order": "keep: !!omap [a: 1]\n",
    "bytes": "keep: !!binary AAAA\n",
    "bytes that are none": "keep: !!binary =\n",
    "a date": "seed: 2001-01-01\n",
    "a date beyond": "seed: 2001-99-99\n",
    "numbers of sixty": "seed: 1" + ":59" * 80_000 + "\n",
    "a number without end": "seed: " + "9" * 200_000 + "\n",
    "a binary number": "seed: 0b" + "1" * 200_000 + "\n",
    "keys that are lists": "? [a]\n: 1\n",
    "keys that are no texts": "1: 1\nnull: 2\ntrue: 3\n",
    "two texts": "a: 1\n---\nb: 2\n",
    "another version": "%YAML 9.9\n---\na: 1\n",
    "control characters": "a: \x07\n",
    "quotes without end": '"' + "a" * 200_000,
    "many lines": "a:\n" + "  - 1\n" * 60_000,
    "many names": "".join(f"n{k}: 1\n" for k in range(20_000)),
    "comments": "#" * 250_000,
    "marks": "- " * 120_000,
    "questions": "? " * 60_000,
    "two megabytes": "a: " + "b" * 2_000_000,
}
for _name, _yaml in YAMLS.items():
    add(
        f"YAML of {_name}",
        lambda f, t=_yaml: _option_of(f, "--config", t.encode(), "t.yaml"),
        *(1, 2, 4),
    )


# Indices of shards


def _index(folder: Path, places: dict[str, Any], **more: Any) -> str:
    safetensors(folder / "s.safetensors", {"w": entry([4], [0, 16])}, _NUMBERS)
    content = {"metadata": {}, "weight_map": places, **more}
    (folder / "m.safetensors.index.json").write_text(json.dumps(content))
    return "inspect m.safetensors.index.json"


SHARDS: dict[str, dict[str, Any]] = {
    "outside": {"w": "../s.safetensors"},
    "of the whole disk": {"w": "/etc/passwd"},
    "of another system": {"w": "C:\\s.safetensors"},
    "by a share": {"w": "\\\\server\\share"},
    "by nothing": {"w": ""},
    "that is a folder": {"w": "."},
    "that is the index": {"w": "m.safetensors.index.json"},
    "that is missing": {"w": "nowhere.safetensors"},
    "by escapes": {"w": "\x1b[2J.safetensors"},
    "by a null": {"w": "s\0.safetensors"},
    "by a very long name": {"w": "s" * 100_000},
    "that is a list": {"w": ["s.safetensors"]},
    "without its tensor": {"v": "s.safetensors"},
    "by a stream": {"w": "s.safetensors:stream"},
    "by half a character": {"w": "\ud800"},
}
for _name, _places in SHARDS.items():
    add(f"a shard {_name}", lambda f, p=_places: _index(f, p), 0, 1)


@attack(1)
def very_many_shards(folder: Path) -> str:
    """Name a hundred thousand shards."""
    return _index(folder, {f"w{k}": f"s{k}.safetensors" for k in range(100_000)})


@attack(0, 1)
def one_shard_by_many_names(folder: Path) -> str:
    """Name one large file in nine thousand ways."""
    aliases = ["./" * k + "big.safetensors" for k in range(1, 2_000)]
    (folder / "d").symlink_to(".")
    aliases += ["d/" * k + "big.safetensors" for k in range(1, 30)]
    header = {f"w{k}": entry([1], [4 * k, 4 * k + 4]) for k in range(20_000)}
    safetensors(folder / "big.safetensors", header, b"\0" * 80_000)
    return _index(folder, {f"w{k}": alias for k, alias in enumerate(aliases)})


@attack(1)
def shards_that_make_many_tensors_of_little(folder: Path) -> str:
    """Give twenty shards of forty thousand tensors each, for a few bytes a tensor."""
    from tests.attacks.pickles import many_tensors

    pickled = many_tensors(40_000, lambda k: f"l{k}.weight")
    for k in range(20):
        torch_zip(folder / f"s{k}.bin", pickled)
    return _index(folder, {f"l{k}.weight": f"s{k}.bin" for k in range(20)})


@attack(1, 4)
def a_shard_that_runs_code(folder: Path) -> str:
    """Put a shard into the folder that would make another one."""
    torch_zip(
        folder / "s.bin", state_dict(("w", tensor()), ("x", b"cos\nmkdir\nX\6\0\0\0canary\x85R"))
    )
    return _index(folder, {"w": "s.bin"})


@attack(0, 1)
def indices_that_name_each_other(folder: Path) -> str:
    """Let two indices name each other as shards."""
    for one, other in (("a", "b"), ("b", "a")):
        content = {"weight_map": {"w": f"{other}.index.json"}}
        (folder / f"{one}.index.json").write_text(json.dumps(content))
    return "inspect a.index.json"


@attack(1, 2)
def a_folder_of_indices(folder: Path) -> str:
    """Give a folder of many indices of many names."""
    for k in range(60):
        places = {f"w{n}": f"s{n}.pt" for n in range(5_000)}
        (folder / f"{k}.index.json").write_text(json.dumps({"weight_map": places}))
    return "inspect ."


# Records


def record(**options: Any) -> dict[str, Any]:
    """Return a record that would like to decide about more than it may."""
    return {
        "fedmerge": "0.1.0",
        "format": 1,
        "schema": 1,
        "options": {"method": "fedma", **options},
        "sources": [],
        "plan": {},
        "assignments": {},
        "tensors": {},
    }


WISHES: dict[str, dict[str, Any]] = {
    "code": {"allow_global": ["builtins.exec"]},
    "a model": {"model": "canary.py:make"},
    "an output": {"output": "canary"},
    "force": {"force": True},
    "a task": {"task": "canary.py:make"},
    "a report": {"report": "canary"},
    "a work dir": {"work_dir": "canary"},
    "events": {"events": "canary"},
    "a plan": {"plan": "canary.json"},
    "data": {"data": "canary.py:make"},
    "threads": {"threads": 1_000_000},
    "sweeps": {"sweeps": 10**9},
    "effort": {"effort": "for ever"},
    "growth": {"max_growth": 1e300},
}
for _name, _wish in WISHES.items():
    add(f"a record that asks for {_name}", lambda f, w=_wish: _record(f, record(**w)), 1, 2, 4)
    add(
        f"a configuration that is a record and asks for {_name}",
        lambda f, w=_wish: _record(f, record(**w), "match --config g.pt.json -o h.pt"),
        *(1, 2, 4),
    )


def _record(folder: Path, content: object, command: str = "") -> str:
    names = clients(folder)
    (folder / "canary.py").write_text("import os\n\n\ndef make(*_):\n    os.mkdir('canary')\n")
    torch_zip(folder / "g.pt", state_dict(("fc1.weight", tensor([2, 2], [2, 1]))))
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "g.pt.json").write_bytes(text)
    return command or f"verify g.pt {names}"


RECORDS: dict[str, bytes] = {
    "deep lists": b"[" * 100_000,
    "nothing": b"",
    "no text": b"\xff" * 100,
    "a list": b"[]",
    "escapes": b'{"fedmerge": "\\u001b[2J", "format": "\\u0007"}',
    "many sources": json.dumps({**record(), "sources": [{"name": "a"}] * 100_000}).encode(),
}
for _name, _text in RECORDS.items():
    add(f"a record of {_name}", lambda f, t=_text: _record(f, t), 1, 2, 4)
    add(
        f"a report about a record of {_name}",
        lambda f, t=_text: _record(f, t, "report g.pt -o r.html"),
        1,
        2,
        4,
    )


@attack(1, 2, 4)
def a_record_of_much(folder: Path) -> str:
    """Give a record that is too large to be one."""
    return _record(folder, b'{"fedmerge": "' + b"v" * HUGE + b'"}')


@attack(1, 2, 4)
def a_record_inside_that_asks_for_code(folder: Path) -> str:
    """Put the record into a safetensors file."""
    metadata = {"fedmerge": json.dumps(record(allow_global=["builtins.exec"]))}
    header = {"__metadata__": metadata, "fc1.weight": entry([2, 2], [0, 16])}
    safetensors(folder / "g.safetensors", header, _NUMBERS)
    return f"verify g.safetensors {clients(folder)}"


@attack(1, 2, 4)
def a_record_in_an_index_that_asks_for_code(folder: Path) -> str:
    """Put the record into the index of shards."""
    command = _index(
        folder, {"w": "s.safetensors"}, metadata={"fedmerge": record(allow_global=["os.system"])}
    )
    return command.replace("inspect", "verify")
