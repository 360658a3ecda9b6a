"""Ways to damage the graph of an exported program: other ops, with arguments of the right types."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from fedmerge.architecture.from_code import known_names

_WHOLE = (0, 1, 2, 3, -1, -2, 7, 64, 1 << 20, 1 << 31, (1 << 63) - 1, -(1 << 63))
_FRACTIONS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, "Infinity", "-Infinity", "NaN")
_TEXTS = ("", "mean", "none", "ab,bc->ac", "ij", "constant", "reflect", "ij,jk->ik,", "\x1b[2J")
_POSITIONAL = 1  # the kind of an argument


def graph_ops(content: bytes, rng: random.Random) -> bytes:
    """Put another op into a graph, or one in place of another."""
    try:
        described = json.loads(content)
        nodes = described["graph_module"]["graph"]["nodes"]
        place = rng.randrange(len(nodes))
        names = _names_before(described["graph_module"]["graph"], place)
        node = _odd_node(names, rng)
    except (ValueError, KeyError, TypeError, IndexError):
        return content[: len(content) // 2]
    if rng.random() < 0.5:  # its result is used, too
        node["outputs"] = nodes[place]["outputs"]
        nodes[place] = node
    else:
        nodes.insert(place, node)
    return json.dumps(described).encode()


def _names_before(graph: Mapping[str, Any], place: int) -> list[str]:
    given = [*graph["inputs"], *(o for node in graph["nodes"][:place] for o in node["outputs"])]
    return [argument["as_tensor"]["name"] for argument in given if "as_tensor" in argument]


def _odd_node(names: list[str], rng: random.Random) -> dict[str, Any]:
    """Return a node that calls a known op on tensors by these names."""
    op = rng.choice(_ops())
    inputs = []
    for argument in op._schema.arguments:
        if argument.has_default_value() and rng.random() < 0.5:
            break
        value = _argument(str(argument.type), names, rng)
        kind = 2 if argument.kwarg_only else _POSITIONAL
        inputs.append({"name": argument.name, "arg": value, "kind": kind})
    return {
        "target": f"torch.ops.{op}",
        "inputs": inputs,
        "outputs": [{"as_tensor": {"name": "odd"}}],
        "metadata": {},
        "is_hop_single_tensor_return": None,
    }


@cache
def _ops() -> list[Any]:
    """Return every overload of every op that a graph may call."""
    packets = [getattr(torch.ops.aten, name, None) for name in sorted(known_names())]
    return [
        getattr(packet, overload)
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    ]


def _argument(kind: str, names: list[str], rng: random.Random) -> dict[str, Any]:
    """Return a value of a type of torch's schemas."""
    if kind.startswith("Optional["):
        if rng.random() < 0.3:
            return {"as_none": True}
        kind = kind.removeprefix("Optional[").removesuffix("]")
    return _KINDS.get(kind, _other)(names, rng)


def _whole_numbers(names: list[str], rng: random.Random) -> dict[str, Any]:
    return {"as_ints": rng.choices(_WHOLE[:9], k=rng.choice((0, 1, 2, 2, 3, 4)))}


def _other(names: list[str], rng: random.Random) -> dict[str, Any]:
    return {"as_string": rng.choice(_TEXTS)}


_KINDS: Mapping[str, Callable[[list[str], random.Random], dict[str, Any]]] = {
    "Tensor": lambda names, rng: {"as_tensor": {"name": rng.choice(names)}},
    "List[Tensor]": lambda names, rng: {
        "as_tensors": [{"name": name} for name in rng.choices(names, k=rng.choice((0, 1, 2, 5)))]
    },
    "List[Optional[Tensor]]": lambda names, rng: {
        "as_optional_tensors": [{"as_tensor": {"name": rng.choice(names)}}, {"as_none": True}]
    },
    **dict.fromkeys(
        ("int", "SymInt", "number", "Scalar"), lambda names, rng: {"as_int": rng.choice(_WHOLE)}
    ),
    **dict.fromkeys(("List[int]", "List[SymInt]"), _whole_numbers),
    "float": lambda names, rng: {"as_float": rng.choice(_FRACTIONS)},
    "List[float]": lambda names, rng: {"as_floats": rng.choices(_FRACTIONS, k=2)},
    "bool": lambda names, rng: {"as_bool": rng.random() < 0.5},
    "List[bool]": lambda names, rng: {"as_bools": rng.choices((True, False), k=3)},
    "ScalarType": lambda names, rng: {"as_scalar_type": rng.choice((1, 5, 6, 7, 8, 11, 12, 29))},
    "MemoryFormat": lambda names, rng: {"as_memory_format": rng.choice((1, 2, 3, 4))},
    "Device": lambda names, rng: {"as_device": {"type": "cuda", "index": 9}},
    "Layout": lambda names, rng: {"as_layout": 7},
}
