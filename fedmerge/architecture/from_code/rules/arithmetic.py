"""Ops on elements, and products of matrices: the contracted axes carry the same units."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmerge.architecture.from_code.labels import Axes, Fixed
from fedmerge.architecture.from_code.trace import (
    Call,
    Result,
    Rule,
    Stacked,
    Summed,
    Value,
)
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


def matmul_axes(call: Call, left: Tensor, right: Tensor) -> Axes:
    """Return the labels of `left @ right` for any dimensions, contracted axes unified."""
    first, second = call.trace.read(left), call.trace.read(right)
    inner = -2 if right.dim() > 1 else -1
    if left.dim() == 0 or right.dim() == 0:
        return call.broadcast([(first, left.shape), (second, right.shape)])
    call.labels.unify(first[-1], second[inner])
    call.trace.contract(left, left.dim() - 1)
    call.trace.contract(right, right.dim() + inner)
    rows = first[-2:-1]
    columns = second[-1:] if right.dim() > 1 else ()
    batches = [(first[:-2], left.shape[:-2]), (second[:-2], right.shape[:-2])]
    shared = call.broadcast(batches) if any(axes for axes, _ in batches) else ()
    call.trace.sums.append(Summed(first[-1], (*rows, *columns), shared))
    return (*shared, *rows, *columns)


def _made(call: Call, weight: Tensor, bias: Tensor | None, axes: Axes) -> Value:
    """Return a result that knows the weight and bias that made it, if they are parameters."""
    name = call.trace.owner(weight)
    own_bias = call.trace.owner(bias)
    is_known = name is not None and (bias is None or own_bias is not None)
    return Value(axes, makers=(name, own_bias) if is_known and name else None)


def matmul(call: Call) -> Result:
    """Multiply two tensors: mm, bmm, matmul, mv, dot."""
    left, right = call.tensors()[:2]
    return _made(call, right, None, matmul_axes(call, left, right))


def added_matmul(call: Call) -> Result:
    """Multiply two tensors and add a third: addmm, baddbmm, addmv."""
    bias, left, right = call.tensors()[:3]
    axes = matmul_axes(call, left, right)
    call.trace.use(bias, "add")
    shape = call.shape
    return _made(
        call, right, bias, call.broadcast([(axes, shape), (call.trace.read(bias), bias.shape)])
    )


def linear(call: Call) -> Result:
    """Multiply by a transposed weight (out, in), and add a bias."""
    inputs, weight, bias = call["input"], call["weight"], call.tensor("bias")
    first, second = call.trace.read(inputs), call.trace.read(weight)
    call.labels.unify(first[-1], second[-1])
    call.trace.contract(weight, weight.dim() - 1)
    out = (*first[:-1], *second[:-1])
    call.trace.sums.append(Summed(first[-1], out, ()))
    if bias is not None:
        call.trace.use(bias, "add")
        call.labels.unify(out[-1], call.trace.read(bias)[-1])
    return _made(call, weight, bias, out)


def grouped(call: Call) -> Result:
    """Multiply runs of rows by a matrix of their own (experts): rows × in, experts × in × out."""
    left, right = call.tensors()[:2]
    first, second = call.trace.read(left), call.trace.read(right)
    if (left.dim(), right.dim()) != (2, 3) or call.tensor("bias") is not None:
        raise ValueError("another kind of grouped product")
    for tensor in call.tensors()[2:]:
        for axis in call.trace.read(tensor):
            call.labels.pin(axis)
    for axis in (first[0], second[0]):
        call.labels.pin(axis)
    call.labels.unify(first[1], second[1])
    call.trace.contract(right, 1)
    return (Fixed(call.shape[0], call.name), second[2])


def outer(call: Call) -> Result:
    """All products of two vectors' elements."""
    left, right = call.tensors()[:2]
    return (*call.trace.read(left), *call.trace.read(right))


def distances(call: Call) -> Result:
    """Compare all rows of two tensors: distances over the last axis."""
    left, right = call["x1"], call["x2"]
    first, second = call.trace.read(left), call.trace.read(right)
    call.labels.unify(first[-1], second[-1])
    call.trace.contract(right, right.dim() - 1)
    batches = [(first[:-2], left.shape[:-2]), (second[:-2], right.shape[:-2])]
    batch = call.broadcast(batches) if any(axes for axes, _ in batches) else ()
    call.trace.sums.append(Summed(first[-1], (first[-2], second[-2]), batch))
    return (*batch, first[-2], second[-2])


def trilinear(call: Call) -> Result:
    """Multiply three tensors with axes added to each, and sum over some (nn.Bilinear)."""
    operands = []
    for number in "123":
        tensor = call[f"i{number}"]
        axes, shape = list(call.trace.read(tensor)), list(tensor.shape)
        for dim in call[f"expand{number}"]:
            axes.insert(dim, Fixed(1))
            shape.insert(dim, 1)
        operands.append((tuple(axes), shape))
    made = call.broadcast(operands)
    return tuple(axis for k, axis in enumerate(made) if k not in call["sumdim"])


ALGEBRA_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "vdot"), matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), added_matmul),
    "linear": linear,
    "_grouped_mm": grouped,
    "transformers::grouped_mm_fallback": grouped,
    "_cdist_forward": distances,
    "_trilinear": trilinear,
    "outer": outer,
    "ger": outer,
}
