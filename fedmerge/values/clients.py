"""Clients as named tensors, and the graph that an exported program holds."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedmerge.decoding import FLOAT_DTYPES
from fedmerge.values.arrays import Array


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


def name_difference(found: Collection[str], expected: Collection[str]) -> str | None:
    """Return how two sets of tensor names differ, in words, or None."""
    there, asked = set(found), set(expected)
    missing = [name for name in expected if name not in there]
    unknown = [name for name in found if name not in asked]
    parts = [f"has no tensor '{missing[0]}'"] if missing else []
    parts += [f"has an extra tensor '{unknown[0]}'"] if unknown else []
    return " and ".join(parts) or None


DTYPES: Mapping[int, str] = {  # the number that stands for a dtype in the JSON, torch's name
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64",
    6: "float16", 7: "float32", 8: "float64", 9: "complex32", 10: "complex64", 11: "complex128",
    12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 34: "uint32", 35: "uint64",
}  # fmt: skip


class ProgramTensor(Protocol):
    """A tensor of a program, whose values are read when they are asked for."""

    @property
    def info(self) -> TensorInfo:
        """Its shape and dtype."""

    @property
    def problem(self) -> str:
        """Why it cannot be used, if it can't."""

    @property
    def memory(self) -> Hashable:
        """What is equal for two names of the same tensor."""

    @property
    def load(self) -> Callable[[], Any]:
        """What gives its values, as a tensor of torch's."""


@dataclass(frozen=True)
class Program:
    """An exported program as its file describes it; nothing of it was run.

    Tensors stand under the program's own names.
    """

    graph_module: Mapping[str, Any]  # the file's JSON: the graph and its signature
    weights: Mapping[str, ProgramTensor]  # parameters and buffers
    constants: Mapping[str, ProgramTensor | None]  # tensors that are no weights; None: no tensor
    examples: tuple[Any, ...]  # torch's tensors it was exported with, flat; () where unknown
