"""Ops on every element by itself: aligned axes carry the same units."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedmerge.architecture.from_code.labels import Fixed
from fedmerge.architecture.from_code.trace import Call, Result, Rule, Stacked, Value
from fedmerge.private_torch import Op

_ADDING = {"add", "sub", "rsub", "cat", "copy", "where"}  # a parameter here makes, not scales


def is_pointwise(func: Op) -> bool:
    """Return whether PyTorch itself says that an op works element by element."""
    return torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


def pointwise(call: Call) -> Result:
    """Unify the axes that broadcasting aligns."""
    tensors = call.tensors()
    if len(tensors) == 1 and len(call.outputs) == 1:
        return same_value(call)
    how = "add" if call.name.rstrip("_") in _ADDING else "scale"
    for tensor in tensors:
        call.trace.use(tensor, how)
    return call.broadcast([(call.trace.read(t), t.shape) for t in tensors])


def same_value(call: Call) -> Result:
    """Keep what is known of the one argument, its slices too."""
    tensor = call.tensors()[0]  # not always the first argument: 2 ** x
    value = call.trace.look(tensor)
    if value.pins or value.stacked is None:
        return call.trace.read(tensor)
    return Value(value.axes, Stacked(value.stacked.dim, value.stacked.slices))


def with_scratch(call: Call) -> Result:
    """Keep the units; the second result is for a backward pass only."""
    axes = call.axes()
    is_alike = [t.shape == call.outputs[0].shape for t in call.outputs[1:]]
    scratch = [tuple(map(Fixed, t.shape)) for t in call.outputs[1:]]
    return [axes, *(axes if a else own for a, own in zip(is_alike, scratch, strict=True))]


def created(call: Call) -> Result:
    """Constants: the same along every axis, whatever they were shaped after."""
    return tuple(call.labels.same(size) for size in call.shape)


def copied(call: Call) -> Result:
    """Another tensor's values, broadcast to the shape of the first."""
    source = call.tensor("src")
    assert source is not None
    call.trace.use(source, "add")
    axes = call.trace.read(source)
    missing = len(call.shape) - len(axes)
    wide = [
        axes[k - missing] if k >= missing and axes[k - missing].size == size else None
        for k, size in enumerate(call.shape)
    ]
    return tuple(
        call.labels.same(size) if tree is None else tree
        for tree, size in zip(wide, call.shape, strict=True)
    )


def counted(call: Call) -> Result:
    """Positions, numbered: pinned."""
    return tuple(Fixed(size, call.name) for size in call.shape)


def scalar(call: Call) -> Result:
    """One number that leaves for Python."""
    call.axes()
    return []


_IDENTITY = (
    "alias", "clone", "_to_copy", "contiguous", "detach", "lift_fresh", "view_as", "to",
    "_conj", "resolve_conj", "resolve_neg", "positive", "dropout", "lift", "lift_fresh_copy",
)  # fmt: skip
_CREATED = (
    "empty", "empty_like", "empty_strided", "full", "full_like", "new_empty", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
    "new_empty_strided",
)  # fmt: skip
_POINTWISE = (
    "_prelu_kernel", "addcdiv", "addcmul", "clamp", "fmod", "lerp", "masked_fill",
    "nan_to_num", "prelu", "where", "softplus", "hardswish", "floor_divide", "polar", "complex",
)  # fmt: skip

POINTWISE_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_IDENTITY, same_value),
    **dict.fromkeys(_CREATED, created),
    **dict.fromkeys(_POINTWISE, pointwise),
    **dict.fromkeys(("arange", "linspace", "eye", "tril_indices", "triu_indices"), counted),
    **dict.fromkeys(("log_sigmoid_forward", "native_dropout"), with_scratch),
    "_local_scalar_dense": scalar,
    "fill": created,
    "zero": created,
    "copy": copied,
}
