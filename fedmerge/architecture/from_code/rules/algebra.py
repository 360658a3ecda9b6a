"""Products of matrices: the contracted axes carry the same units, the others stay."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedmerge.architecture.from_code.labels import Axes, Fixed
from fedmerge.architecture.from_code.trace import Call, Result, Rule, Value


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
    return (*(call.broadcast(batches) if any(axes for axes, _ in batches) else ()), *rows, *columns)


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
