"""The tensors of a file under the names that they have there, with no model looked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmerge.checkpoint._checkpoint import reading
from fedmerge.checkpoint._containers import read_container
from fedmerge.checkpoint._contents import ReadOptions
from fedmerge.checkpoint._failures import unreadable
from fedmerge.checkpoint._tensors import StoredTensor, to_array
from fedmerge.errors import CheckpointError
from fedmerge.types.arrays import Array
from fedmerge.types.clients import TensorInfo


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
