"""Ops on windows of images and sequences: convolutions, pooling, and what undoes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmerge.architecture.from_code.labels import Axes, Fixed, Tree, concat, product
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


def _spatial(axes_count: int) -> Rule:
    """Return the rule of an op over the last `axes_count` axes."""

    def rule(call: Call) -> Result:
        axes = call.axes()
        kept = len(axes) - axes_count
        for axis in axes[kept:]:
            call.labels.pin(axis, "pixels")
        for tensor in call.tensors()[1:]:
            for axis in call.trace.read(tensor):
                call.labels.pin(axis)
        return [
            (*axes[:kept], *(Fixed(size, "pixels") for size in output.shape[kept:]))
            for output in call.outputs
        ]

    return rule


def constant_pad(call: Call) -> Result:
    """Surround axes by a constant; negative padding crops."""
    axes = list(call.axes())
    pad = call["pad"]
    for pair in range(len(pad) // 2):
        axis = len(axes) - 1 - pair
        before, after = pad[2 * pair], pad[2 * pair + 1]
        tree, size = axes[axis], axes[axis].size
        crop = (max(0, -before), size - max(0, -before) - max(0, -after), max(0, -after))
        tree = call.labels.cut(tree, crop)[1]
        padding = [call.labels.same(max(0, n)) for n in (before, after)]
        axes[axis] = concat((padding[0], tree, padding[1]))
    return tuple(axes)


def pixel_shuffle(call: Call) -> Result:
    """Move blocks of channels into pixels."""
    axes, factor = call.axes(), call["upscale_factor"]
    own = call.labels.split(axes[-3], (axes[-3].size // factor**2, factor**2))
    call.labels.pin(own[1], "pixels")
    return (*axes[:-3], own[0], *(Fixed(size, "pixels") for size in call.shape[-2:]))


def patches(call: Call) -> Result:
    """Put every window's pixels next to its channel (im2col): C × window, windows."""
    axes = call.axes()
    for axis in axes[-2:]:
        call.labels.pin(axis, "pixels")
    window = call.shape[-2] // axes[-3].size
    return (*axes[:-3], product((axes[-3], Fixed(window, "pixels"))), Fixed(call.shape[-1]))


def pixel_unshuffle(call: Call) -> Result:
    """Move blocks of pixels into channels."""
    axes = call.axes()
    for axis in axes[-2:]:
        call.labels.pin(axis, "pixels")
    block = Fixed(call["downscale_factor"] ** 2, "pixels")
    pixels = (Fixed(size, "pixels") for size in call.shape[-2:])
    return (*axes[:-3], product((axes[-3], block)), *pixels)


def folded(call: Call) -> Result:
    """Add windows up to an image (col2im): C × window, windows."""
    axes = call.axes()
    call.labels.pin(axes[-1], "pixels")
    window = axes[-2].size // call.shape[-3]
    channel, inner = call.labels.split(axes[-2], (call.shape[-3], window))
    call.labels.pin(inner, "pixels")
    return (*axes[:-2], channel, *(Fixed(size, "pixels") for size in call.shape[-2:]))


def shuffled(call: Call) -> Result:
    """Read channels G × c as c × G."""
    axes, groups = call.axes(), call["groups"]
    slow, fast = call.labels.split(axes[1], (groups, axes[1].size // groups))
    return (axes[0], product((fast, slow)), *axes[2:])


def sampled(call: Call) -> Result:
    """Sample an image at the points of a grid, the same for all channels."""
    axes = call.axes()
    for axis in (*axes[2:], *call.axes("grid")):
        call.labels.pin(axis, "pixels")
    return (*axes[:2], *(Fixed(size, "pixels") for size in call.shape[2:]))


def unfold(call: Call) -> Result:
    """Show sliding windows of one axis as a new last axis."""
    axes, dim = call.axes(), call.dim("dimension")
    call.labels.pin(axes[dim])
    return (*axes[:dim], Fixed(call.shape[dim]), *axes[dim + 1 :], Fixed(call.shape[-1]))


_BY_RANK = {
    1: ("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d",
        "upsample_linear1d", "upsample_nearest1d", "reflection_pad1d", "replication_pad1d",
        "_upsample_nearest_exact1d"),
    2: ("avg_pool2d", "max_pool2d_with_indices", "max_pool2d", "_adaptive_avg_pool2d",
        "adaptive_max_pool2d", "adaptive_avg_pool2d", "upsample_bilinear2d", "upsample_bicubic2d",
        "upsample_nearest2d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa", "reflection_pad2d", "replication_pad2d", "max_unpool2d",
        "fractional_max_pool2d"),
    3: ("avg_pool3d", "max_pool3d_with_indices", "_adaptive_avg_pool3d", "adaptive_max_pool3d",
        "adaptive_avg_pool3d", "upsample_trilinear3d", "upsample_nearest3d", "replication_pad3d",
        "reflection_pad3d", "_upsample_nearest_exact3d"),
}  # fmt: skip

POOLING_RULES: Mapping[str, Rule] = {
    **{name: _spatial(rank) for rank, names in _BY_RANK.items() for name in names},
    "constant_pad_nd": constant_pad,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "channel_shuffle": shuffled,
    "grid_sampler_2d": sampled,
    "grid_sampler_3d": sampled,
    "col2im": folded,
    "im2col": patches,
    "unfold": unfold,
}
