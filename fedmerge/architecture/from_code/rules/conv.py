"""Convolutions: channels carry units, pixels and kernels are pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmerge.architecture.from_code.labels import Axes, Fixed, Tree, product
from fedmerge.architecture.from_code.trace import Call, Result, Rule, Value


def convolution(call: Call) -> Result:
    """Read channels through weight axis 1 (0 if transposed); groups split them as G × c."""
    inputs, weight, bias = call["input"], call["weight"], call.tensor("bias")
    seen, kernel = call.trace.read(inputs), call.trace.read(weight)
    _pixels(call, seen[2:], kernel[2:])
    made = _channels(call, seen[1], kernel)
    call.trace.contract(weight, 0 if call["transposed"] else 1)
    name, own_bias = call.trace.owner(weight), call.trace.owner(bias)
    if bias is not None:
        call.trace.use(bias, "add")
        call.labels.unify(made, call.trace.read(bias)[0])
    axes = (seen[0], made, *(Fixed(size, "pixels") for size in call.shape[2:]))
    is_known = name is not None and (bias is None or own_bias is not None)
    return Value(axes, makers=(name, own_bias) if is_known and name else None)


def _pixels(call: Call, seen: Axes, kernel: Axes) -> None:
    """Pin pixels; a kernel as large as what it reads sums over it as a linear layer does."""
    for number, (axis, own) in enumerate(zip(seen, kernel, strict=True)):
        is_whole = axis.size == own.size and not call["transposed"]
        if is_whole and not _at(call["padding"], number) and _at(call["dilation"], number) == 1:
            call.labels.unify(axis, own)
        else:
            call.labels.pin(axis, "pixels")
            call.labels.pin(own, "pixels")


def _at(values: Sequence[int], number: int) -> int:
    """Return the value for one of the axes; a single one stands for all."""
    return values[number] if len(values) > 1 else values[0]


def _channels(call: Call, seen: Tree, kernel: Axes) -> Tree:
    """Tie the input channels and return the output channels."""
    groups = call["groups"] or 1
    reads, makes = (kernel[0], kernel[1]) if call["transposed"] else (kernel[1], kernel[0])
    if groups == 1:
        call.labels.unify(seen, reads)
        return makes
    if call["transposed"]:
        return _grouped_transposed(call, seen, kernel, groups)
    if reads.size == 1:
        return _depthwise(call, seen, makes)
    own = call.labels.split(seen, (groups, seen.size // groups))
    made = call.labels.split(makes, (groups, makes.size // groups))
    for tree in (own[0], made[0]):
        call.labels.pin(tree, "groups of a convolution")
    call.labels.unify(own[1], reads)
    return makes


def _depthwise(call: Call, seen: Tree, makes: Tree) -> Tree:
    """Every channel has kernels of its own, so its units go on."""
    own, several = call.labels.split(makes, (seen.size, makes.size // seen.size))
    call.labels.pin(several, "kernels per channel")
    call.labels.unify(own, seen)
    return makes


def _grouped_transposed(call: Call, seen: Tree, kernel: Axes, groups: int) -> Tree:
    call.labels.unify(seen, kernel[0])
    if kernel[1].size == 1 and seen.size == groups:
        return seen
    call.labels.pin(call.labels.split(seen, (groups, seen.size // groups))[0], "groups")
    return product((Fixed(groups, "groups of a convolution"), kernel[1]))


CONV_RULES: Mapping[str, Rule] = {
    "convolution": convolution,
    "_convolution": convolution,
    "convolution_overrideable": convolution,
}
