"""Arguments of an exported program's calls: what its file says of them, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedmerge.values.clients import DTYPES

_MEMORY_FORMATS: Mapping[int, torch.memory_format] = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}


_PLAIN = (*("as_int", "as_ints", "as_bool", "as_bools", "as_int_lists", "as_string"),)


_SYMBOLS = ("as_sym_int", "as_sym_float", "as_sym_bool")


Part = Callable[[Mapping[str, Any]], Any]


def decode(
    argument: Mapping[str, Any],
    values: Mapping[str, Any],
    dtypes: Mapping[torch.dtype, torch.dtype],
    part: Part | None = None,
) -> Any:
    """Return an argument's value: a number, a tensor by its name, a dtype, a graph as a function.

    `dtypes` says which dtype stands for an exported one where the model was cast since.
    """
    ((kind, value),) = argument.items()
    if kind in _PLAIN:
        return value
    if kind == "as_tensor" or kind in _SYMBOLS:
        return _named(value, values)
    if kind in ("as_tensors", "as_optional_tensors", *(f"{symbol}s" for symbol in _SYMBOLS)):
        return [_named(item, values) for item in value]
    if kind == "as_scalar_type":
        dtype: torch.dtype = getattr(torch, DTYPES[value])
        return dtypes.get(dtype, dtype)
    if kind == "as_graph" and part is not None:
        return part(value["graph"])
    return _OTHERS[kind](value, values)


def _named(value: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return a tensor or number by its name, or the plain number in its place."""
    if "name" in value:
        return values[value["name"]]
    ((kind, inner),) = value.items()
    if kind == "as_name":
        return values[inner]
    if kind == "as_tensor":
        return values[inner["name"]]
    return None if kind == "as_none" else inner


def _floats(value: Any, values: Mapping[str, Any]) -> Any:
    """Return numbers, of which infinity and NaN are written as strings."""
    if isinstance(value, list):
        return [_floats(item, values) for item in value]
    return float(value)


_OTHERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    **dict.fromkeys(("as_float", "as_floats", "as_float_lists"), _floats),
    "as_none": lambda value, values: None,
    "as_memory_format": lambda value, values: _MEMORY_FORMATS[value],
    "as_layout": lambda value, values: torch.strided,
    "as_device": lambda value, values: torch.device("cpu"),  # where the model is followed
    "as_optional_tensor": _named,
    "as_nested_tensors": lambda value, values: [[_named(t, values) for t in row] for row in value],
    "as_complex": lambda value, values: complex(value["real"], value["imag"]),
}


def name_of(argument: Mapping[str, Any]) -> str | None:
    """Return the name that a graph's input or output goes by, None for a plain value."""
    found = names_of(argument)
    return found[0] if len(found) == 1 else None


def names_of(argument: Mapping[str, Any]) -> list[str | None]:
    """Return the names of a node's result, which may be a list of tensors."""
    ((kind, value),) = argument.items()
    if kind == "as_tensors":
        return [str(item["name"]) for item in value]
    if kind == "as_tensor":
        return [str(value["name"])]
    if kind in _SYMBOLS:
        return [value.get("as_name")]
    return [None]


def sizes_of(described: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return a shape; of a size that may vary, the one that the program was exported with."""
    sizes = []
    for entry in described:
        size = entry["as_int"] if "as_int" in entry else entry["as_expr"]["hint"]["as_int"]
        if type(size) is not int or size < 0:
            raise ValueError(f"a size that is no number: {size!r}")
        sizes.append(size)
    return tuple(sizes)
