"""What is written: tensors under their final names, and where their values come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fedmerge.checkpoint._tensors import from_array, non_finite, torch_dtype
from fedmerge.errors import CheckpointError
from fedmerge.types.arrays import Array
from fedmerge.types.clients import TensorInfo

Digests: TypeAlias = dict[str, str]
BuildRecord: TypeAlias = Callable[[Mapping[str, str]], dict[str, Any]]


@dataclass(frozen=True)
class Model:
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
        if info.is_float and (count := sum(non_finite(tensor))):
            raise CheckpointError(
                f"{self.path}: {count:,} values of '{name}' do not fit into {info.dtype}",
                "choose a wider type with --dtype",
            )
        return tensor

    def size(self, name: str) -> int:
        """Return how many bytes a tensor fills."""
        info = self.tensors[name]
        return info.size * torch_dtype(info.dtype).itemsize
