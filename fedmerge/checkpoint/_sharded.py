"""Read checkpoints that an index spreads over several files."""

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from msgspec import Struct

from fedmerge.checkpoint._contents import Contents
from fedmerge.checkpoint._failures import damaged, listed
from fedmerge.checkpoint._files import SourceFile
from fedmerge.decoding import decode_json, read_text
from fedmerge.errors import CheckpointError


class ShardIndex(Struct):
    """What is needed of an index; it may hold more."""

    weight_map: dict[str, str]  # tensor → file


def read_index(path: Path, read_shard: Callable[[Path], Contents]) -> Contents:
    """Read the union of the shards that a `*.index.json` names."""
    places = weight_map(path)
    shards = {shard: _open_shard(path, shard, read_shard) for shard in sorted(set(places.values()))}
    tree = {name: _tensor(path, name, shard, shards[shard]) for name, shard in places.items()}
    kinds = sorted(
        {"safetensors" if c.container == "safetensors" else "torch" for c in shards.values()}
    )
    metadata = {k: v for contents in shards.values() for k, v in contents.metadata.items()}
    files = (
        SourceFile.of(path),
        *(file for contents in shards.values() for file in contents.files),
    )
    return Contents(f"sharded {' and '.join(kinds)}", tree, files, metadata)


def weight_map(path: Path) -> dict[str, str]:
    """Return which shard an index names for each tensor."""

    def fail(reason: str) -> CheckpointError:
        return damaged(path, f"no readable shard index: {reason}")

    places = decode_json(read_text(path, fail=fail), ShardIndex, fail=fail).weight_map
    if not places:
        raise CheckpointError(f"{path}: its weight_map names no tensors")
    return places


def _open_shard(index: Path, shard: str, read_shard: Callable[[Path], Contents]) -> Contents:
    if not _stays_inside(shard):
        raise CheckpointError(
            f"{index}: names a shard outside its folder: {shard!r}", "do not trust this index"
        )
    path = index.parent / shard
    if not path.exists():
        raise CheckpointError(
            f"{index}: its shard {shard!r} is missing", "copy or download all shards"
        )
    return read_shard(path)


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
