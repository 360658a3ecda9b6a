"""Norms: per channel they carry units on, over units they forbid growth."""

from __future__ import annotations

from collections.abc import Mapping

from fedmerge.architecture.from_code.labels import Axes, Fixed
from fedmerge.architecture.from_code.trace import Call, FoundNorm, Result, Rule, Value


def _affine(call: Call, axes: Axes, names: tuple[str, ...]) -> None:
    """Tie the norm's own tensors to the axes that they stand for."""
    for name in names:
        tensor = call.tensor(name)
        if tensor is not None and tensor.numel():
            call.trace.use(tensor, "scale")
            for own, axis in zip(call.trace.read(tensor), axes, strict=True):
                call.labels.unify(own, axis)


def batch_norm(call: Call) -> Result:
    """Normalise every channel by itself."""
    axes = call.axes()
    channel = axes[1:2] if len(axes) > 1 else axes
    _affine(call, channel, ("weight", "bias", "running_mean", "running_var"))
    _found(call)
    return _with_statistics(call, axes)


def _found(call: Call) -> None:
    """Record a batch norm with statistics that directly follows what made its input."""
    makers = call.trace.look(call.first).makers
    names = {k: call.trace.owner(call.tensor(k)) for k in ("running_mean", "running_var")}
    mean, variance = names["running_mean"], names["running_var"]
    training = bool(call["training"])
    if makers and mean and variance and not training:
        scale, shift = (call.trace.owner(call.tensor(k)) for k in ("weight", "bias"))
        found = FoundNorm(makers, scale, shift, mean, variance, float(call["eps"]))
        call.trace.norms.append(found)


def _with_statistics(call: Call, axes: Axes) -> list[Axes | Value]:
    """Return the labels of the result and pinned ones for saved statistics."""
    others = [tuple(Fixed(size) for size in t.shape) for t in call.outputs[1:]]
    return [axes, *others]


def _normalised(call: Call, axes: Axes, count: int, why: str) -> list[Axes | Value]:
    for axis in axes[len(axes) - count :]:
        call.labels.mark(axis, why)
    return _statistics(call, axes, count)


def _statistics(call: Call, axes: Axes, count: int) -> list[Axes | Value]:
    kept: Axes = (*axes[: len(axes) - count], *(Fixed(1),) * count)
    shown = [kept if t.dim() == len(axes) else None for t in call.outputs[1:]]
    assert None not in shown, "statistics of another shape"
    return [axes, *(kept for _ in shown)]


def layer_norm(call: Call) -> Result:
    """Normalise over the last axes."""
    axes = call.axes()
    count = len(call["normalized_shape"])
    _affine(call, axes[len(axes) - count :], ("weight", "bias"))
    return _normalised(call, axes, count, "layer norm over the units")


def rms_norm(call: Call) -> Result:
    """Divide by the root mean square over the last axes."""
    axes = call.axes()
    count = len(call["normalized_shape"])
    _affine(call, axes[len(axes) - count :], ("weight",))
    return _normalised(call, axes, count, "RMS norm over the units")


def group_norm(call: Call) -> Result:
    """Normalise over groups of channels, so that C = G × c."""
    axes = call.axes()
    channel = axes[1]
    groups = call["group"]
    own, inner = call.labels.split(channel, (groups, channel.size // groups))
    if inner.size > 1:
        call.labels.pin(own, "groups of a norm")
    _affine(call, (channel,), ("weight", "bias"))
    call.labels.mark(channel, "group norm over the units")
    return _with_statistics(call, axes)


def softmax(call: Call) -> Result:
    """Normalise exponentials over one axis."""
    axes = call.axes()
    call.labels.mark(axes[call.dim()], "softmax over the units")
    return axes


def weight_norm(call: Call) -> Result:
    """Give every slice of a direction its own length."""
    direction, length = call["v"], call["g"]
    axes, lengths = call.trace.read(direction), call.trace.read(length)
    dim = int(call["dim"] or 0) % len(axes)
    call.labels.unify(axes[dim], lengths[dim])
    call.labels.mark(axes[dim], "weight norm of a zero unit is not a number")
    return [axes, lengths]


_BATCH = (
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm", "batch_norm", "_batch_norm_no_update", "_batch_norm_with_update",
)  # fmt: skip

NORM_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_BATCH, batch_norm),
    "native_layer_norm": layer_norm,
    "_fused_rms_norm": rms_norm,
    "rms_norm": rms_norm,
    "native_group_norm": group_norm,
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "softmax"), softmax),
    "_weight_norm_interface": weight_norm,
}
