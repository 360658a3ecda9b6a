"""Open any container with the reader that its first bytes ask for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._exported import read_exported
from fedmerge.checkpoint._files import SourceFile
from fedmerge.checkpoint._paths import model_file
from fedmerge.checkpoint._safetensors import read_safetensors
from fedmerge.checkpoint._scripted import read_scripted
from fedmerge.checkpoint._sharded import read_index
from fedmerge.checkpoint._sniff import kind_of
from fedmerge.checkpoint._torch_files import read_legacy, read_zip, refuse_pickle
from fedmerge.errors import CheckpointError

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
