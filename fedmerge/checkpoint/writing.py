"""Write a model and its merge record as safetensors, shards or a torch file."""

import hashlib
import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeAlias

import numpy as np
import torch

from fedmerge.checkpoint.lightning import STATE_DICT
from fedmerge.checkpoint.outputs import Staging, compact, naming_alone, readable, staging
from fedmerge.checkpoint.paths import (
    RECORD_KEY,
    SAFETENSORS,
    check_output,
    existing_files,
    index_path,
    record_path,
)
from fedmerge.checkpoint.safetensors_files import DTYPES, LARGEST_HEADER, METADATA
from fedmerge.checkpoint.tensors import Values, from_array, non_finite, raw_bytes, torch_dtype
from fedmerge.decoding import decode_json, decode_value, read_text
from fedmerge.errors import CheckpointError
from fedmerge.private_torch import rebuild_tensor, rebuild_tensor_as
from fedmerge.values.clients import TensorInfo

Digests: TypeAlias = dict[str, str]
BuildRecord: TypeAlias = Callable[[Mapping[str, str]], dict[str, Any]]

_PARKED = ".fedmerge-{}.old"  # no leftover that may be swept: an index names it


def shard_paths(path: Path, count: int) -> list[Path]:
    """Return the files of a sharded output.

    >>> [shard.name for shard in shard_paths(Path("global.safetensors"), 2)]
    ['global-00001-of-00002.safetensors', 'global-00002-of-00002.safetensors']
    """
    return [
        path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")
        for number in range(1, count + 1)
    ]


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


@dataclass(frozen=True)
class Model:
    """What to write: final names and dtypes, and where the values come from."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Values]
    aliases: Mapping[str, str]
    record: BuildRecord | None
    beside: Mapping[str, Any] | None = None  # of the state dict, which is then one entry of these

    def write_values(self, name: str, file: IO[bytes]) -> str:
        """Write a tensor's numbers in the dtype in which it is written; return their SHA-256."""
        content, count = hashlib.sha256(), 0
        for piece in self._pieces(name):
            data = raw_bytes(piece).data
            file.write(data)
            content.update(data)
            count += piece.numel()
        assert count == self.tensors[name].size, f"{name}: {count} numbers"
        return content.hexdigest()

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor's numbers, all at once or some at a time, that fit into its dtype."""
        info, values = self.tensors[name], self.read(name)
        if isinstance(values, np.ndarray):
            assert values.shape == info.shape, f"{name}: {values.shape} is not {info.shape}"
            values = [from_array(values, info.dtype)]
        for piece in values:
            if info.is_float and (count := sum(non_finite(piece))):
                raise CheckpointError(
                    f"{self.path}: {count:,} values of '{name}' do not fit into {info.dtype}",
                    "choose a wider type with `dtype`",
                )
            yield piece

    def size(self, name: str) -> int:
        """Return how many bytes a tensor fills."""
        info = self.tensors[name]
        return info.size * torch_dtype(info.dtype).itemsize


_ROOT = "archive"  # as torch.save names it for a buffer
_VERSION = b"3\n"  # of the format
_PROTOCOL = 2  # the pickle protocol of torch.save
_ALIGNMENT = 64  # bytes, for memory-mapped reading
_LOCAL_HEADER = 30  # bytes before a record's name
_ZIP64_HEADER = 20  # bytes that a large record's sizes take
_LARGE = 1 << 30  # bytes; zip needs such sizes from 4 GiB, the library from 2 GiB
_PADDING = b"FB"  # the extra field in which torch pads
_STORAGES = {
    "float64": torch.DoubleStorage,
    "float32": torch.FloatStorage,
    "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage,
    "int64": torch.LongStorage,
    "int32": torch.IntStorage,
    "int16": torch.ShortStorage,
    "int8": torch.CharStorage,
    "uint8": torch.ByteStorage,
    "bool": torch.BoolStorage,
}


def write_torch(model: Model, stage: Staging) -> Digests:
    """Write a state dict, and its record beside it."""
    stored = [name for name in model.tensors if name not in model.aliases]
    digests: Digests = {}
    with zipfile.ZipFile(stage.create(model.path), "w") as archive:
        _add(archive, "data.pkl", _pickled(model, stored))
        _add(archive, "byteorder", sys.byteorder.encode())
        for key, name in enumerate(stored):
            with _record(archive, f"data/{key}", model.size(name)) as file:
                digests[name] = model.write_values(name, file)
        _add(archive, "version", _VERSION)
    digests = {name: digests[model.aliases.get(name, name)] for name in model.tensors}
    if model.record is not None:
        text = readable(model.record(digests))
        stage.create(record_path(model.path)).write(text.encode())
    return digests


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    with _record(archive, name, len(content)) as file:
        file.write(content)


def _record(archive: zipfile.ZipFile, name: str, size: int) -> IO[bytes]:
    """Open a record whose bytes begin at a multiple of the alignment, the same on any system."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system = 0
    info.file_size = size
    is_large = info.file_size > _LARGE
    fixed = _LOCAL_HEADER + len(info.filename) + 4 + (_ZIP64_HEADER if is_large else 0)
    assert archive.fp is not None
    padding = -(archive.fp.tell() + fixed) % _ALIGNMENT
    info.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    return archive.open(info, "w", force_zip64=is_large)


@dataclass(frozen=True)
class _Storage:
    """Stands for a storage while the state dict is pickled."""

    kind: type
    key: str
    count: int


class _Tensor:
    """Stands for a tensor: pickled as torch pickles one, but without its values."""

    def __init__(self, info: TensorInfo, key: int) -> None:
        self._info, self._key = info, str(key)

    def __reduce__(self) -> tuple[Any, ...]:
        info = self._info
        strides = torch.empty(info.shape, device="meta").stride()
        hooks: OrderedDict[int, object] = OrderedDict()
        place = (0, info.shape, strides, False, hooks)
        if info.dtype in _STORAGES:
            storage = _Storage(_STORAGES[info.dtype], self._key, info.size)
            return rebuild_tensor, (storage, *place)
        dtype = getattr(torch, info.dtype)
        storage = _Storage(torch.UntypedStorage, self._key, info.size * dtype.itemsize)
        return rebuild_tensor_as, (storage, *place, dtype)


class _Pickler(pickle.Pickler):
    """A pickler that names storages as torch does."""

    def persistent_id(self, item: object) -> tuple[Any, ...] | None:
        """Return what stands for a storage in the file."""
        if isinstance(item, _Storage):
            return ("storage", item.kind, item.key, "cpu", item.count)
        return None


def _pickled(model: Model, stored: list[str]) -> bytes:
    tensors = {name: _Tensor(model.tensors[name], key) for key, name in enumerate(stored)}
    state = {name: tensors[model.aliases.get(name, name)] for name in model.tensors}
    content = io.BytesIO()
    tree = state if model.beside is None else {STATE_DICT: state, **model.beside}
    _Pickler(content, protocol=_PROTOCOL).dump(tree)
    return content.getvalue()


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
    written = {name: model.write_values(name, file) for name in order}
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


_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def write_model(
    path: str | Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Values],
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    record: BuildRecord | None = None,
    force: bool = False,
    again: bool = False,
    shard_size: int | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Digests:
    """Write tensors under their final names and return the SHA-256 of each.

    `read` gives each tensor as an array of its shape, or in flat pieces of its dtype; `aliases` are
    further names of earlier tensors, which torch files store once; `record` builds the merge record
    from the digests, and must be as long for any others. Bytes depend on the content alone. With
    `shard_size` the tensors go into files of at most so many bytes of values, and an index.
    `force` replaces what is there; `again`: files with the same content may be there already.
    `beside`: what a torch file holds of plain values, around its state dict.
    """
    path = Path(path)
    check_output(path, inputs=[], force=force or again, sharded=shard_size is not None)
    assert {*aliases, *aliases.values()} <= set(tensors)
    model = Model(path, tensors, read, aliases, record, beside)
    if shard_size is not None:
        return _write_sharded(model, shard_size, force=force, again=again)
    write = write_safetensors if path.suffix.lower() == SAFETENSORS else write_torch
    with _writing(path), staging() as stage:
        digests = write(model, stage)
        for file in stage.paths:
            stage.finish(file)  # which takes its time
        with naming_alone(path.parent):
            _give_names(stage, path, force=force, again=again)
    return digests


def _give_names(stage: Staging, path: Path, *, force: bool, again: bool) -> None:
    """Name a model's files such that no record ever stands beside another model."""
    if force:
        is_inside = path.suffix.lower() == SAFETENSORS
        stage.commit(force=True, gone=() if is_inside else [record_path(path)])
    else:  # the record first: where the model is, it has its record
        stage.commit(force=False, again=again, order=stage.paths[::-1])


def write_text(path: str | Path, text: str, *, force: bool) -> None:
    """Write a text file whole or not at all; with `force`, in place of an older one."""
    write_bytes(path, text.encode(), force=force)


def write_bytes(path: str | Path, content: bytes, *, force: bool) -> None:
    """Write a file whole or not at all; with `force`, in place of an older one."""
    with _writing(Path(path)), staging() as stage:
        stage.create(Path(path)).write(content)
        stage.commit(force=force)


def write_program(
    path: str | Path, content: bytes, record: Mapping[str, Any], *, force: bool
) -> None:
    """Write an exported program, and its record beside it."""
    path = Path(path)
    with _writing(path), staging() as stage:
        stage.create(path).write(content)
        stage.create(record_path(path)).write(readable(record).encode())
        for file in stage.paths:
            stage.finish(file)
        with naming_alone(path.parent):
            _give_names(stage, path, force=force, again=False)


def _write_sharded(model: Model, shard_size: int, *, force: bool, again: bool) -> Digests:
    """Write shards, then their index: it never names a shard that is missing or another model's."""
    index = index_path(model.path)
    with _writing(index), staging() as stage:
        digests = write_shards(model, stage, shard_size)
        with naming_alone(index.parent):
            older = existing_files(model.path) if force else []
            parked = _keep_whole(index, stage.paths) if force else ()
            stage.commit(force=force, again=again)
            for path in {*older, *parked}.difference(stage.paths):
                path.unlink(missing_ok=True)
    return digests


def _keep_whole(index: Path, new: Sequence[Path]) -> Sequence[Path]:
    """Keep an old model whole until the new index is in place; return its hidden files."""
    try:
        old = park_shards(index, new)
    except OSError:  # no hard links here: no model is better than a mixed one
        index.unlink()
        return ()
    if old is None:
        return ()
    write_text(index, old.index, force=True)
    return old.parked


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error})", "nothing was changed"
        ) from error
