"""Ways to damage a file: its bytes, the records of a zip, the steps of a pickle, values of JSON."""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
import warnings
import zipfile
from collections.abc import Callable
from typing import TypeAlias

from benchmarks.fuzz.graph_mutations import graph_ops
from tests.mutants import mutant

Mutate: TypeAlias = Callable[[bytes, random.Random], bytes]

_YAML = (
    *(b"!!int", b"!!float", b"!!bool", b"!!timestamp", b"!!binary", b"!!set", b"!!omap", b"!!str"),
    *(
        b"!!python/object/apply:os.mkdir [canary]",
        b"!own",
        b"&a",
        b"*a",
        b"<<",
        b"2001-01-01",
        b"~",
    ),
    *(
        b"0x1f",
        b"0o17",
        b"1:59:59",
        b"1_000",
        b".inf",
        b".nan",
        b"1e5",
        b"yes",
        b"{",
        b"[",
        b"}",
        b"|",
    ),
    *(b">", b"%", b"@", b"'", b'"', b"#", b"---", b"...", b"\xff", b"\xef\xbb\xbf", b"\0"),
)
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1)
_STEPS = (  # of pickles, that a mutant may get
    *(b"(", b"0", b"1", b"2", b".", b"N", b"}", b"]", b")", b"t", b"l", b"d", b"a", b"e", b"s"),
    *(b"u", b"b", b"R", b"\x81", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x90", b"\x91", b"\x93"),
    *(b"\x94", b"K\x00", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x00", b"Q", b"h\x00"),
    *(b"cos\nsystem\n", b"cbuiltins\nexec\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"q\x00"),
    *(b"ctorch\nFloatStorage\n", b"c_codecs\nencode\n", b"cbuiltins\nbytearray\n", b"X\0\0\0\0"),
    *(
        b"\x8c\x02os",
        b"U\x01a",
        b"C\x01a",
        b"I1\n",
        b"F1.5\n",
        b"S'a'\n",
        b"Va\n",
        b"p0\n",
        b"g0\n",
    ),
)


def any_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change, cut, insert, repeat or swap a few bytes."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(changed) + 1) if changed else 0
        length = rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0:
                changed[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                number = rng.choice(_NUMBERS)
                changed[place : place + 8] = number.to_bytes(8, rng.choice(("little", "big")))
            case 2:
                del changed[place : place + length]
            case 3:
                changed[place:place] = rng.randbytes(length)
            case 4:
                changed[place:place] = changed[place : place + length] * rng.choice((1, 2, 50))
            case _:
                del changed[place:]
    return bytes(changed)


def json_values(content: bytes, rng: random.Random) -> bytes:
    """Change values of a JSON text."""
    try:
        value = json.loads(content)
    except ValueError:
        return any_bytes(content, rng)
    return json.dumps(mutant(value, rng, changes=rng.choice((1, 1, 3)))).encode()


def pickle_steps(content: bytes, rng: random.Random) -> bytes:
    """Drop, repeat, exchange or insert steps of a pickle; bytes after it stay."""
    try:
        places = [place for _, _, place in pickletools.genops(content) if place is not None]
    except Exception:  # pickletools raises nearly anything on a damaged pickle
        places = []
    if not places:
        return any_bytes(content, rng)
    stream = io.BytesIO(content)
    for _ in pickletools.genops(stream):
        pass
    end = stream.tell()
    pairs = zip(places, [*places[1:], end], strict=True)
    steps = [content[begin:stop] for begin, stop in pairs]
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(steps))
        match rng.randrange(5):
            case 0:
                del steps[place]
            case 1:
                steps.insert(place, rng.choice(_STEPS))
            case 2:
                steps[place] = rng.choice(_STEPS)
            case 3:
                steps[place:place] = [steps[place]] * rng.choice((1, 3, 1000))
            case _:
                other = rng.randrange(len(steps))
                steps[place], steps[other] = steps[other], steps[place]
        steps = steps or [b"."]
    return b"".join(steps) + content[end:]


def zip_records(content: bytes, rng: random.Random) -> bytes:
    """Change a record of a zip file by its kind, with a right checksum; or the directory."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            records = [(entry, archive.read(entry)) for entry in archive.infolist()]
    except Exception:  # no zip file any more
        records = []
    if not records:
        return any_bytes(content, rng)
    number = rng.randrange(len(records))
    entry, record = records[number]
    name, method = entry.filename, zipfile.ZIP_STORED
    match rng.randrange(8):
        case 0:
            del records[number]
        case 1:
            records.append((entry, record))
        case 2:
            name = rng.choice(("../up", "/abs", "a" * 60_000, "", name + "x", name.upper()))
            records[number] = (zipfile.ZipInfo(name), record)
        case 3:
            method = zipfile.ZIP_DEFLATED
        case _:
            records[number] = (entry, _by_kind(name)(record, rng))
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names that come twice
        for own, text in records:
            archive.writestr(zipfile.ZipInfo(own.filename), text, method)
    return target.getvalue()


def _by_kind(name: str) -> Mutate:
    if name.endswith(".pkl"):
        return pickle_steps
    if "models/" in name:
        return _graph_or_values
    return json_values if name.endswith(".json") else any_bytes


def _graph_or_values(content: bytes, rng: random.Random) -> bytes:
    return rng.choice((graph_ops, json_values))(content, rng)


def zip_directory(content: bytes, rng: random.Random) -> bytes:
    """Change a number in a header of a zip file: of a record, in the directory or at its end."""
    signature, length = rng.choice(
        ((b"PK\1\2", 46), (b"PK\1\2", 46), (b"PK\3\4", 30), (b"PK\5\6", 22))
    )
    places = [found.start() for found in re.finditer(signature, content)]
    if not places:
        return any_bytes(content, rng)
    place = rng.choice(places) + rng.randrange(4, length - 1)
    size = rng.choice((2, 4, 8))
    number = rng.choice(_NUMBERS) & ((1 << 8 * size) - 1)
    return content[:place] + number.to_bytes(size, "little") + content[place + size :]


def yaml_text(content: bytes, rng: random.Random) -> bytes:
    """Insert what only YAML understands: tags, anchors, aliases, dates, other numbers."""
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            key, colon, value = lines[place].partition(b": ")
            lines[place] = key + colon + rng.choice(_YAML) + b" " + value
        case 1:
            key, colon, _ = lines[place].partition(b": ")
            lines[place] = key + colon + rng.choice(_YAML)
        case 2:
            lines.insert(place, rng.choice(_YAML) + b": " + rng.choice(_YAML))
        case _:
            lines[place] = (
                rng.choice((b" ", b"- ", b"? ", b"\t")) * rng.choice((1, 5, 3000)) + lines[place]
            )
    return b"\n".join(lines)


def safetensors_header(content: bytes, rng: random.Random) -> bytes:
    """Change values of a safetensors header, whose length stays right."""
    length = int.from_bytes(content[:8], "little")
    header = json_values(content[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def legacy_pickles(content: bytes, rng: random.Random) -> bytes:
    """Change steps of one of the five pickles of a legacy torch file."""
    stream, begins = io.BytesIO(content), [0]
    try:
        for _ in range(4):
            for _ in pickletools.genops(stream):
                pass
            begins.append(stream.tell())
    except Exception:  # damaged before
        return any_bytes(content, rng)
    begin = rng.choice(begins)
    return content[:begin] + pickle_steps(content[begin:], rng)
