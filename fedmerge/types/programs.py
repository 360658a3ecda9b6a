"""What an exported program's file says of its model."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedmerge.types.clients import TensorInfo

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
