"""What the algorithms see of a checkpoint: names, shapes and dtypes at once, tensors on demand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fedmerge.types.arrays import Array

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch.", e.g. "bfloat16"

    @property
    def is_float(self) -> bool:
        """Whether the tensor takes part in matching and averaging."""
        return self.dtype in FLOAT_DTYPES

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        count = 1
        for length in self.shape:
            count *= length
        return count


class Client(Protocol):
    """One set of named tensors to merge, wherever it is stored."""

    @property
    def name(self) -> str:
        """How messages, records and options call this client."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor in stored order, under its normalised name."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors, each with the earlier name whose tensor it shares."""

    def read(self, name: str) -> Array:
        """Return one tensor: floats as float64 if stored so, else float32; others as stored."""


@dataclass(frozen=True)
class ClientView:
    """A client seen otherwise than it is stored: who derives from this reads its tensors anew."""

    client: Client

    @property
    def name(self) -> str:
        """The client's name."""
        return self.client.name

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The client's tensors."""
        return self.client.tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        """The client's tied tensors."""
        return self.client.aliases
