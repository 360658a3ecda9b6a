"""Write safetensors, one file or several with an index."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO

from fedmerge.checkpoint._model import Digests, Model
from fedmerge.checkpoint._record import RECORD_KEY, compact, readable
from fedmerge.checkpoint._safetensors import DTYPES, LARGEST_HEADER, METADATA
from fedmerge.checkpoint._shards import index_path, shard_paths, split
from fedmerge.checkpoint._staging import Staging
from fedmerge.checkpoint._tensors import digest, raw_bytes, torch_dtype
from fedmerge.errors import CheckpointError
from fedmerge.types.clients import TensorInfo

_TAGS = {name: tag for tag, name in DTYPES.items()}
_NO_DIGEST = "0" * 64


def write_safetensors(model: Model, stage: Staging) -> Digests:
    """Write header, data, and the header again once the digests are known."""
    if METADATA in model.tensors:
        raise CheckpointError(f"{model.path}: safetensors allows no tensor called '{METADATA}'")
    order = _by_alignment(model.tensors)
    empty = _header(model, order, dict.fromkeys(model.tensors, _NO_DIGEST))
    file = stage.create(model.path)
    file.write(empty)
    written = {name: _write_data(file, model, name) for name in order}
    digests = {name: written[name] for name in model.tensors}
    header = _header(model, order, digests)
    assert len(header) == len(empty), "the record's length depends on the digests"
    file.seek(0)
    file.write(header)
    stage.finish(model.path)
    return digests


def write_shards(model: Model, stage: Staging, most: int) -> Digests:
    """Write shards of at most `most` bytes, then their index with the merge record."""
    sizes = {name: model.size(name) for name in model.tensors}
    shards = split(sizes, most)
    digests: Digests = {}
    places: dict[str, str] = {}
    for path, names in zip(shard_paths(model.path, len(shards)), shards, strict=True):
        part = {name: model.tensors[name] for name in names}
        digests |= write_safetensors(replace(model, path=path, tensors=part, record=None), stage)
        places |= dict.fromkeys(names, path.name)
    metadata: dict[str, Any] = {"total_size": sum(sizes.values())}
    if model.record is not None:
        metadata[RECORD_KEY] = model.record(digests)
    index = readable({"metadata": metadata, "weight_map": places})
    stage.create(index_path(model.path)).write(index.encode())
    return digests


def _write_data(file: BinaryIO, model: Model, name: str) -> str:
    tensor = model.tensor(name)
    file.write(raw_bytes(tensor).data)
    return digest(tensor)


def _by_alignment(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names, wide types first, so that every tensor lies at a multiple of its type."""
    return sorted(tensors, key=lambda name: -torch_dtype(tensors[name].dtype).itemsize)


def _header(model: Model, order: list[str], digests: Digests) -> bytes:
    metadata = {"format": "pt"}
    if model.record is not None:
        metadata[RECORD_KEY] = compact(model.record(digests))
    places = _places(model, order)
    content = {METADATA: metadata} | {name: places[name] for name in digests}
    text = compact(content).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise CheckpointError(
            f"{model.path}: names and merge record are too long for the safetensors format",
            "let the output end in .pt",
        )
    return len(text).to_bytes(8, "little") + text


def _places(model: Model, order: list[str]) -> dict[str, dict[str, Any]]:
    places: dict[str, dict[str, Any]] = {}
    end = 0
    for name in order:
        info = model.tensors[name]
        begin, end = end, end + model.size(name)
        entry = {"dtype": _TAGS[info.dtype], "shape": list(info.shape)}
        places[name] = entry | {"data_offsets": [begin, end]}
    return places
