"""Which functions an exported graph may call, by the names that its file uses."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from fedmerge.graph.model.rules import RULES, is_pointwise

Operator: TypeAlias = Callable[..., Any]

# Composite ops: torch takes them apart into ops that have rules.
_COMPOSITE = frozenset({
    "_weight_norm",
    "adaptive_avg_pool1d", "adaptive_max_pool1d", "adjoint", "alpha_dropout", "argsort",
    "avg_pool1d", "bilinear", "broadcast_tensors", "broadcast_to", "cdist", "celu", "concat",
    "concatenate", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "cosine_similarity", "diff", "dropout", "dstack", "einsum",
    "embedding_bag", "expand_as", "feature_alpha_dropout", "feature_dropout", "flatten",
    "fliplr", "flipud", "group_norm", "hstack", "index_fill", "inner", "instance_norm",
    "layer_norm", "linalg_norm", "linalg_vector_norm", "log_softmax", "mT", "masked_scatter",
    "masked_select", "max_pool1d", "max_pool2d", "max_pool3d", "meshgrid", "moveaxis", "movedim",
    "multiply", "narrow", "one_hot", "pad", "pairwise_distance", "ravel", "reshape_as",
    "repeat_interleave", "rms_norm", "rsub", "select_scatter", "selu", "slice_scatter",
    "softmax", "softmin",
    "squeeze", "sum_to_size", "swapaxes", "swapdims", "take_along_dim", "tensor_split",
    "tensordot", "tile", "type_as", "unflatten", "unfold", "upsample_nearest_exact1d", "vstack",
})  # fmt: skip
_SIZES = frozenset({"sym_size", "sym_stride", "sym_numel", "sym_storage_offset"})
_CHECKS = re.compile(r"torch\.ops\.aten\.(_assert_\w+|sym_constrain_range\w*)(\.\w+)?")
_LARGEST = 1 << 63  # of whole numbers: products of products would grow without end


def _of_numbers(function: Operator) -> Operator:
    """Return arithmetic that takes numbers only, not text or lists that it would repeat."""

    def call(*numbers: Any) -> Any:
        result = function(*map(_number, numbers))
        return _number(result)

    return call


def _number(value: Any) -> Any:
    if type(value) not in (int, float, bool) or not -_LARGEST <= value < _LARGEST:
        raise ValueError("arithmetic on something else than numbers of ordinary size")
    return value


def _item(values: Any, place: Any) -> Any:
    """Return one of several results."""
    if not isinstance(values, list | tuple) or type(place) is not int:
        raise ValueError("an item of something that is no list")
    return values[place]


_NUMBERS: Mapping[str, Operator] = {
    **{
        f"_operator.{name}": _of_numbers(getattr(operator, name))
        for name in (
            *("add", "sub", "mul", "floordiv", "mod", "neg", "truediv"),
            *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
        )
    },
    "_operator.getitem": _item,
    **{
        f"torch.{name}": _of_numbers(getattr(torch, name))
        for name in ("sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite")
    },
}
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


def _run_part(_: object, part: Operator, *args: Any) -> Any:
    """Run a graph that was exported under no_grad or autocast off, which change no units."""
    return part(*args)


_HIGHER_ORDER: Mapping[str, Operator] = {
    **{
        f"torch.ops.higher_order.{name}": getattr(torch.ops.higher_order, name)
        for name in ("cond", "while_loop", "scan", "map_impl")
        if hasattr(torch.ops.higher_order, name)
    },
    "torch.ops.higher_order.wrap_with_set_grad_enabled": _run_part,
}


def operator_of(target: str) -> Operator:
    """Return the function that a name in a graph stands for; raise ValueError if none may run."""
    if _CHECKS.fullmatch(target):
        return lambda *args, **kwargs: None
    for table in (_NUMBERS, _HIGHER_ORDER):
        if target in table:
            return table[target]
    found = _ATEN.fullmatch(target)
    op = _aten(*found.groups()) if found else None
    if op is None:
        raise ValueError(f"it calls '{target}', which fedmerge does not know")
    return op


def _aten(name: str, overload: str) -> Operator | None:
    packet = getattr(torch.ops.aten, name, None)
    op = getattr(packet, overload, None)
    if not isinstance(op, torch._ops.OpOverload):
        return None
    known = name in RULES or name.rstrip("_") in RULES or name in _COMPOSITE or name in _SIZES
    return op if known or is_pointwise(op) else None
