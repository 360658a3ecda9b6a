"""Write a merged model and its record: tensor by tensor, whole or not at all."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, BinaryIO, TypeAlias, cast

import torch

from fedmerge.checkpoint._output import SAFETENSORS, check_output
from fedmerge.checkpoint._record import RECORD_KEY, compact, readable, record_path
from fedmerge.checkpoint._safetensors import DTYPES, LARGEST_HEADER, METADATA
from fedmerge.checkpoint._staging import Staging, staging
from fedmerge.checkpoint._tensors import digest, from_array, raw_bytes, torch_dtype
from fedmerge.errors import CheckpointError
from fedmerge.types.arrays import Array
from fedmerge.types.clients import TensorInfo

Digests: TypeAlias = dict[str, str]
BuildRecord: TypeAlias = Callable[[Mapping[str, str]], dict[str, Any]]

_TAGS = {name: tag for tag, name in DTYPES.items()}
_NO_DIGEST = "0" * 64
_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class _Model:
    """What to write: final names and dtypes, and where the values come from."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Array]
    aliases: Mapping[str, str]
    record: BuildRecord | None

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the dtype in which it is written."""
        info = self.tensors[name]
        tensor = from_array(self.read(name), info.dtype)
        assert tensor.shape == info.shape, f"{name}: {tensor.shape} is not {info.shape}"
        if info.is_float and not bool(torch.isfinite(tensor).all()):
            count = int(tensor.numel() - torch.isfinite(tensor).sum())
            raise CheckpointError(
                f"{self.path}: {count:,} values of '{name}' do not fit into {info.dtype}",
                "choose a wider type with --dtype",
            )
        return tensor


def write_model(
    path: str | Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Array],
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    record: BuildRecord | None = None,
    force: bool = False,
) -> Digests:
    """Write tensors under their final names and return the SHA-256 of each.

    `read` gives each tensor as an array of its shape; `aliases` are further names of earlier
    tensors, which torch files store once; `record` builds the merge record from the
    digests, and must be as long for any others. Bytes depend on the content alone.
    """
    path = Path(path)
    check_output(path, inputs=[], force=force)
    assert {*aliases, *aliases.values()} <= set(tensors)
    model = _Model(path, tensors, read, aliases, record)
    write = _write_safetensors if path.suffix.lower() == SAFETENSORS else _write_torch
    with _writing(path), staging() as stage:
        digests = write(model, stage)
        stage.commit()
    if record is None and path.suffix.lower() != SAFETENSORS:
        record_path(path).unlink(missing_ok=True)  # it described the file that was replaced
    return digests


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all, in place of an older one."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file whole or not at all, in place of an older one."""
    with _writing(Path(path)), staging() as stage:
        stage.create(Path(path)).write(content)
        stage.commit()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error})", "nothing was changed"
        ) from error


def _write_torch(model: _Model, stage: Staging) -> Digests:
    state: dict[str, torch.Tensor] = {}
    for name in model.tensors:
        tied_to = model.aliases.get(name)
        # A copy: arrays that share memory by chance must not become tied tensors.
        state[name] = state[tied_to] if tied_to else model.tensor(name).clone()
    digests = {name: digest(tensor) for name, tensor in state.items()}
    # Given a path, torch would write the file's name into the file.
    _save(state, stage.create(model.path))
    if model.record is not None:
        text = readable(model.record(digests))
        stage.create(record_path(model.path)).write(text.encode())
    return digests


def _save(state: dict[str, torch.Tensor], file: BinaryIO) -> None:
    """Save a state dict; what goes wrong in the file is raised as it was, not as torch hides it."""
    watched = _WatchedFile(file)
    try:
        torch.save(state, cast(IO[bytes], watched), _use_new_zipfile_serialization=True)
    except RuntimeError:
        if watched.failure is not None:
            raise watched.failure from None
        raise


class _WatchedFile(io.BufferedIOBase):
    """A file that remembers the exception that ended a write: torch turns any into its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write bytes, and remember if that fails or is interrupted."""
        try:
            return self._file.write(data)
        except BaseException as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Leave flushing to the file's owner."""


def _write_safetensors(model: _Model, stage: Staging) -> Digests:
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
    return digests


def _write_data(file: BinaryIO, model: _Model, name: str) -> str:
    tensor = model.tensor(name)
    file.write(raw_bytes(tensor).data)
    return digest(tensor)


def _by_alignment(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names, wide types first, so that every tensor lies at a multiple of its type."""
    return sorted(tensors, key=lambda name: -torch_dtype(tensors[name].dtype).itemsize)


def _header(model: _Model, order: list[str], digests: Digests) -> bytes:
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


def _places(model: _Model, order: list[str]) -> dict[str, dict[str, Any]]:
    places: dict[str, dict[str, Any]] = {}
    end = 0
    for name in order:
        info = model.tensors[name]
        begin, end = end, end + info.size * torch_dtype(info.dtype).itemsize
        entry = {"dtype": _TAGS[info.dtype], "shape": list(info.shape)}
        places[name] = entry | {"data_offsets": [begin, end]}
    return places
