"""How an output is spread over several files: sizes, names, and what is there already."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmerge.checkpoint._record import readable
from fedmerge.decoding import decode_json, decode_value, read_text
from fedmerge.errors import CheckpointError, UsageError

INDEX = ".index.json"
_PARKED = ".fedmerge-{}.old"  # no leftover that may be swept: an index names it
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {"": 1, "b": 1, **_DECIMAL, **_BINARY}  # in lower case


def parse_size(size: str | int | None) -> int | None:
    """Return a size in bytes, from a number or text with a unit; None stays None.

    >>> [parse_size(size) for size in ("2GB", "1.5 MiB", "500", 7, None)]
    [2000000000, 1572864, 500, 7, None]
    """
    if size is None:
        return None
    found = _SIZE.fullmatch(str(size))
    unit = _UNITS.get(found[2].lower()) if found else None
    count = int(float(found[1]) * unit) if found and unit else 0
    if count < 1:
        raise UsageError(
            f"--shard-size is {str(size)!r}, expected a number of bytes, e.g. 2GB, 500MB or 1GiB"
        )
    return count


def index_path(path: Path) -> Path:
    """Return where the index of a sharded output lies.

    >>> index_path(Path("global.safetensors")).name
    'global.safetensors.index.json'
    """
    return path.with_name(path.name + INDEX)


def written_path(path: str | Path, *, sharded: bool) -> Path:
    """Return the file to open in order to read an output: itself, or the index of its shards."""
    return index_path(Path(path)) if sharded else Path(path)


def shard_paths(path: Path, count: int) -> list[Path]:
    """Return the files of a sharded output.

    >>> [shard.name for shard in shard_paths(Path("global.safetensors"), 2)]
    ['global-00001-of-00002.safetensors', 'global-00002-of-00002.safetensors']
    """
    return [
        path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")
        for number in range(1, count + 1)
    ]


def existing_files(path: Path) -> list[Path]:
    """Return what is there of an output by this name: one file, an index, shards of any number.

    Also shards that a killed run left parked.
    """
    name = re.escape(path.stem) + r"-[0-9]{5,}-of-[0-9]{5,}" + re.escape(path.suffix)
    shard = re.compile(rf"{name}|\.fedmerge-{name}\.old")
    found = sorted(p for p in path.parent.iterdir() if shard.fullmatch(p.name))
    return [p for p in (path, index_path(path), *found) if p.exists() or p.is_symlink()]


def split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return names in their order in shards of at most `most` bytes, or of one larger tensor.

    >>> split({"a": 4, "b": 4, "c": 20, "d": 1}, 10)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


@dataclass(frozen=True)
class ParkedShards:
    """An old model under names that no new shard takes, and the index that says so."""

    index: str
    parked: tuple[Path, ...]


def park_shards(index: Path, new: Sequence[Path]) -> ParkedShards | None:
    """Link the shards of an old model that new ones will replace to hidden names.

    With the index returned, the old model stays whole until the new index takes its place. None
    where no shard of an old model is replaced.
    """
    try:
        content = decode_json(
            read_text(index, fail=CheckpointError), dict[str, Any], fail=CheckpointError
        )
        places = decode_value(content.get("weight_map"), dict[str, str], fail=CheckpointError)
    except CheckpointError:
        return None  # no old model that could be kept whole
    named = set(places.values())
    replaced = {p.name: p for p in new if p.name in named and p.exists()}
    if not replaced:
        return None
    hidden = {name: _PARKED.format(name) for name in replaced}
    for name, path in replaced.items():
        parked = path.with_name(hidden[name])
        if parked.name not in places.values():  # left by a run that was killed while it parked
            parked.unlink(missing_ok=True)
        os.link(path, parked)
    content["weight_map"] = {tensor: hidden.get(s, s) for tensor, s in places.items()}
    return ParkedShards(readable(content), tuple(index.with_name(h) for h in hidden.values()))
