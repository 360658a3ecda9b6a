"""Open a checkpoint of any container: what is in it, under which names."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fedmerge.checkpoint.exported_programs import read_exported
from fedmerge.checkpoint.files import Contents, ReadOptions, SourceFile, reason_of, unreadable
from fedmerge.checkpoint.legacy_torch_files import read_legacy, refuse_pickle
from fedmerge.checkpoint.lightning import (
    LIGHTNING,
    STATE_DICT,
    LightningEntries,
    entries_to_write,
    lightning_entries,
)
from fedmerge.checkpoint.paths import client_names, kind_of, model_file
from fedmerge.checkpoint.safetensors_files import read_safetensors
from fedmerge.checkpoint.shard_indices import read_index
from fedmerge.checkpoint.state_dicts import normalise
from fedmerge.checkpoint.tensors import StoredTensor, digest, non_finite, raw_bytes, to_array
from fedmerge.checkpoint.torch_files import read_zip
from fedmerge.checkpoint.torchscript import read_scripted
from fedmerge.errors import CheckpointError
from fedmerge.values.arrays import Array
from fedmerge.values.clients import Program, TensorInfo

_READERS: Mapping[str, Callable[[SourceFile, ReadOptions], Contents]] = {
    "zip": read_zip,
    "legacy": read_legacy,
    "safetensors": read_safetensors,
    "pickle": refuse_pickle,
    "exported program": read_exported,
    "TorchScript": read_scripted,
}


def read_container(path: Path, options: ReadOptions) -> Contents:
    """Read a file, the shards of an index, or the model of a Hugging Face folder."""
    if path.is_dir():
        path = _model_in(path)
    kind = kind_of(path)
    if kind == "index":
        return read_index(path, lambda shard: _read_shard(shard, options))
    return _READERS[kind](SourceFile.of(path), options)


def _model_in(folder: Path) -> Path:
    found = model_file(folder)
    if found is None:
        raise CheckpointError(
            f"{folder}: a folder, but not one that a Hugging Face model was saved to",
            "give the checkpoint files themselves",
        )
    return found


def _read_shard(file: SourceFile, options: ReadOptions) -> Contents:
    kind = kind_of(file.path)
    if kind == "index":
        raise CheckpointError(f"{file.path}: a shard index where a shard was expected")
    return _READERS[kind](file, options)


_DEFAULTS = ReadOptions()


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A `Client` read from files or memory; nothing that `read` returned is kept."""

    name: str
    path: Path | None
    container: str  # e.g. "torch zip", "sharded safetensors"; "state dict" in memory
    location: str  # dotted path of the state dict in the container, "" for the top level
    weights: str  # "raw" or "ema"
    prefix: str  # stripped from the names here, kept in the names that are written
    notes: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]
    size: int  # bytes of all files, 0 in memory
    metadata: Mapping[str, str]
    program: Program | None  # the graph that an exported program's file has beside the weights
    lightning: LightningEntries | None  # what a Lightning checkpoint has beside the weights
    reading: ReadOptions  # how it was read
    _stored: Mapping[str, StoredTensor] = field(repr=False)
    _files: tuple[SourceFile, ...] = field(repr=False)
    _finite: set[str] = field(repr=False, default_factory=set)  # names already checked

    def read(self, name: str) -> Array:
        """Return a tensor as a new array that the caller owns; refuse NaN and infinities."""
        return to_array(self.read_torch(name))

    def read_torch(self, name: str) -> torch.Tensor:
        """Return a tensor in its stored dtype, as `read` otherwise."""
        name = self.aliases.get(name, name)
        tensor = self._load(name)
        if self.tensors[name].is_float and name not in self._finite:
            self._check_finite(name, tensor)
            self._finite.add(name)
        return tensor

    def pieces(self, name: str, most: int) -> Iterator[torch.Tensor]:
        """Yield a tensor's numbers in their stored dtype, at most so many at a time.

        NaN and infinities are not refused: who computes with the numbers sees them soon enough.
        """
        name = self.aliases.get(name, name)
        with reading(f"{self._label}: '{name}'"):
            yield from self._stored[name].pieces(most)

    def is_finite(self) -> bool:
        """Return whether no tensor has NaN or infinities; all are read for it."""
        floats = (name for name, info in self.tensors.items() if info.is_float)
        return not any(any(non_finite(self._load(name))) for name in floats)

    def renamed(self, name: str) -> Checkpoint:
        """Return the same checkpoint under another client's name."""
        return replace(self, name=name)

    def with_names(self, names: Mapping[str, str], prefix: str) -> Checkpoint:
        """Return the same checkpoint under other names of its tensors, without those not named."""
        return replace(
            self,
            tensors=MappingProxyType({new: self.tensors[own] for own, new in names.items()}),
            aliases={names[a]: names[n] for a, n in self.aliases.items() if a in names},
            prefix=prefix,
            _stored={new: self._stored[own] for own, new in names.items() if own in self._stored},
            _finite=set(),
        )

    def output_name(self, name: str) -> str:
        """Return the name under which a merge of this client writes a tensor."""
        return self.prefix + name

    def beside_state_dict(self, path: str | Path) -> Mapping[str, Any] | None:
        """Return what an output has besides the state dict, from this client; None: nothing."""
        if Path(path).suffix.lower() != LIGHTNING:
            return None
        entries: Mapping[str, Any] = entries_to_write(self.lightning, source=self.name, path=path)
        return entries

    def tensor_digest(self, name: str) -> str:
        """Return the SHA-256 of a tensor's contiguous bytes in its stored dtype."""
        return digest(self._load(self.aliases.get(name, name)))

    def sha256(self) -> str:
        """Return the SHA-256 of the file; of all files' hashes, or of the tensors, if no file."""
        if not self._files:
            return self._content_digest()
        with reading(self._label):
            digests = [file.sha256() for file in self._files]
        if len(digests) == 1:
            return digests[0]
        named = zip(self._files, digests, strict=True)
        lines = "".join(sorted(f"{file.path.name}:{sha}\n" for file, sha in named))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def _label(self) -> str:
        return self.name if self.path is None else str(self.path)

    def _load(self, name: str) -> torch.Tensor:
        with reading(f"{self._label}: '{name}'"):
            return self._stored[name].load()

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        nan, infinite = non_finite(tensor)
        if not nan and not infinite:
            return
        found = [f"{n:,} {what}" for n, what in ((nan, "NaN"), (infinite, "infinite")) if n]
        raise CheckpointError(
            f"{self._label}: '{name}' has {' and '.join(found)} of {tensor.numel():,} values",
            "its training diverged; leave this client out",
        )

    def _content_digest(self) -> str:
        content = hashlib.sha256()
        for name, info in self.tensors.items():
            content.update(f"{name}:{info.dtype}:{info.shape}\n".encode())
            content.update(raw_bytes(self._load(name)).data)
        for alias, name in self.aliases.items():
            content.update(f"{alias}={name}\n".encode())
        return content.hexdigest()


def open_checkpoint(
    path: str | Path, options: ReadOptions = _DEFAULTS, *, name: str | None = None
) -> Checkpoint:
    """Open a checkpoint file, a shard index or a Hugging Face folder; nothing in it is run."""
    path = Path(path)
    with _without_garbage_collection():
        try:
            contents = read_container(path, options)
        except OSError as error:
            raise unreadable(path, error) from error
        return _build(contents, options, name=name or client_names([path])[0], path=path)


def from_state_dict(tensors: Mapping[str, torch.Tensor], *, name: str) -> Checkpoint:
    """Take a state dict in memory for a checkpoint, under the same rules as a file."""
    return _build(Contents("state dict", tensors), _DEFAULTS, name=name, path=None)


def _build(contents: Contents, options: ReadOptions, **place: Any) -> Checkpoint:
    label = str(place["path"] or place["name"])
    found = normalise(contents, options, label)
    return Checkpoint(
        **place,
        container=contents.container,
        location=found.location,
        weights=found.weights,
        prefix=found.prefix,
        notes=found.notes,
        tensors=MappingProxyType({name: t.info for name, t in found.tensors.items()}),
        aliases=found.aliases,
        size=contents.size,
        metadata=MappingProxyType(dict(contents.metadata)),
        program=contents.programs.get(found.location),
        lightning=lightning_entries(contents.tree) if found.location == STATE_DICT else None,
        reading=options,
        _stored=found.tensors,
        _files=contents.files,
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Spare Python the search for cycles among very many new values, which takes a third more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what can go wrong while values are read into an error that names them."""
    try:
        yield
    except OSError as error:
        raise unreadable(what, error) from error
    except (EOFError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{what}: cannot be read ({reason_of(error)})") from error


@dataclass(frozen=True)
class NamedTensors:
    """What a file holds: tensors, read when they are asked for, and text about them."""

    path: Path
    metadata: Mapping[str, str]
    _stored: Mapping[str, StoredTensor]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor, in the file's order."""
        return {name: tensor.info for name, tensor in self._stored.items()}

    def read(self, name: str) -> Array:
        """Return a tensor as a new array, half precision widened to float32."""
        if problem := self._stored[name].problem:
            raise CheckpointError(f"{self.path}: '{name}' {problem}")
        with reading(f"{self.path}: '{name}'"):
            return to_array(self._stored[name].load())


def open_tensors(path: Path) -> NamedTensors:
    """Return the tensors at the top level of a safetensors or torch file; nothing in it is run."""
    try:
        contents = read_container(path, ReadOptions())
    except OSError as error:
        raise unreadable(path, error) from error
    if not isinstance(contents.tree, Mapping):
        found = type(contents.tree).__name__
        raise CheckpointError(f"{path}: it holds a {found}, expected a dictionary of tensors")
    named = {
        name: value.within(contents.size)
        for name, value in contents.tree.items()
        if isinstance(name, str) and isinstance(value, StoredTensor)
    }
    return NamedTensors(path, contents.metadata, named)
