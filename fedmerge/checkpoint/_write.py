"""Write a merged model and its record: tensor by tensor, whole or not at all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from fedmerge.checkpoint._model import BuildRecord, Digests, Model
from fedmerge.checkpoint._output import SAFETENSORS, check_output
from fedmerge.checkpoint._record import record_path
from fedmerge.checkpoint._shards import existing_files, index_path, park_shards
from fedmerge.checkpoint._staging import Staging, naming_alone, staging
from fedmerge.checkpoint._write_safetensors import write_safetensors, write_shards
from fedmerge.checkpoint._write_torch import write_torch
from fedmerge.errors import CheckpointError
from fedmerge.types.arrays import Array
from fedmerge.types.clients import TensorInfo

_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def write_model(
    path: str | Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Array],
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    record: BuildRecord | None = None,
    force: bool = False,
    again: bool = False,
    shard_size: int | None = None,
) -> Digests:
    """Write tensors under their final names and return the SHA-256 of each.

    `read` gives each tensor as an array of its shape; `aliases` are further names of earlier
    tensors, which torch files store once; `record` builds the merge record from the
    digests, and must be as long for any others. Bytes depend on the content alone. With
    `shard_size` the tensors go into files of at most so many bytes of values, and an index.
    `force` replaces what is there; `again`: files with the same content may be there already.
    """
    path = Path(path)
    check_output(path, inputs=[], force=force or again, sharded=shard_size is not None)
    assert {*aliases, *aliases.values()} <= set(tensors)
    model = Model(path, tensors, read, aliases, record)
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
