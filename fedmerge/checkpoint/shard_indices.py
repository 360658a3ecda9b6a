"""Read an index of shards: which file holds each tensor."""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from msgspec import Struct

from fedmerge.checkpoint.files import (
    Contents,
    SourceFile,
    damaged,
    listed,
)
from fedmerge.decoding import decode_json, read_text
from fedmerge.errors import CheckpointError

MOST_SHARDS = 10_000


class ShardIndex(Struct):
    """What is needed of an index; it may hold more."""

    weight_map: dict[str, str]  # tensor → file


def read_index(path: Path, read_shard: Callable[[SourceFile], Contents]) -> Contents:
    """Read the union of the shards that a `*.index.json` names, each file once."""
    places, index = weight_map(path), SourceFile.of(path)
    read: dict[Hashable, Contents] = {}  # by file: one may have many names
    shards: dict[str, Contents] = {}
    for shard in sorted(set(places.values())):
        file = _shard_file(index, shard)
        if file.identity not in read:
            read[file.identity] = read_shard(file)
        shards[shard] = read[file.identity]
    tree = {name: _tensor(path, name, shard, shards[shard]) for name, shard in places.items()}
    kinds = sorted(
        {"safetensors" if c.container == "safetensors" else "torch" for c in read.values()}
    )
    metadata = {k: v for contents in read.values() for k, v in contents.metadata.items()}
    files = (index, *(file for contents in read.values() for file in contents.files))
    return Contents(f"sharded {' and '.join(kinds)}", tree, files, metadata)


def weight_map(path: Path) -> dict[str, str]:
    """Return which shard an index names for each tensor."""

    def fail(reason: str) -> CheckpointError:
        return damaged(path, f"no readable shard index: {reason}")

    places = decode_json(read_text(path, fail=fail), ShardIndex, fail=fail).weight_map
    if not places:
        raise CheckpointError(f"{path}: its weight_map names no tensors")
    if len(set(places.values())) > MOST_SHARDS:
        raise CheckpointError(f"{path}: its weight_map names more than {MOST_SHARDS:,} shards")
    return places


def _shard_file(index: SourceFile, shard: str) -> SourceFile:
    if not _stays_inside(shard):
        raise CheckpointError(
            f"{index.path}: names a shard outside its folder: {shard!r}", "do not trust this index"
        )
    path = index.path.parent / shard
    if not path.exists():
        raise CheckpointError(
            f"{index.path}: its shard {shard!r} is missing", "copy or download all shards"
        )
    return SourceFile.of(path, index.budget)


def _stays_inside(shard: str) -> bool:
    """Decide by the name alone: links are fine, model caches are made of them."""
    for flavour in (PurePosixPath(shard), PureWindowsPath(shard)):
        if flavour.anchor or ".." in flavour.parts or not flavour.parts:
            return False
    return shard.isprintable()


def _tensor(index: Path, name: str, shard: str, contents: Contents) -> object:
    if not isinstance(contents.tree, Mapping) or name not in contents.tree:
        held = list(map(str, contents.tree)) if isinstance(contents.tree, Mapping) else []
        raise CheckpointError(
            f"{index}: '{name}' is not in its shard {shard!r}",
            f"the shard holds {listed(held) or 'no tensors'}; copy or download all files again",
        )
    return contents.tree[name]
