"""What an exported program's file says of its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES: Mapping[int, str] = {  # the number that stands for a dtype in the JSON, torch's name
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64",
    6: "float16", 7: "float32", 8: "float64", 9: "complex32", 10: "complex64", 11: "complex128",
    12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 34: "uint32", 35: "uint64",
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """An exported program as its file describes it; nothing of it was run.

    Tensors are torch's, under the program's own names.
    """

    graph_module: Mapping[str, Any]  # the file's JSON: the graph and its signature
    weights: Mapping[str, Any]  # parameters and buffers
    constants: Mapping[str, Any]  # tensors that are no weights
    examples: tuple[Any, ...]  # the inputs it was exported with, flat; () where unknown
