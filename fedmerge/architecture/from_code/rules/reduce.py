"""Reductions: what is left does not depend on the order of the units that are gone."""

from __future__ import annotations

from collections.abc import Mapping

from fedmerge.architecture.from_code.labels import Axes, Fixed
from fedmerge.architecture.from_code.trace import Call, Result, Rule, Value

_GROWS = {"sum", "nansum", "any", "linalg_vector_norm", "norm", "count_nonzero", "native_norm"}


def reduction(call: Call) -> Result:
    """Drop (or keep at size 1) the reduced axes; a mean would see added units."""
    axes, kept = _reduced(call)
    if call.name not in _GROWS:
        for k, axis in enumerate(axes):
            if k in set(call.dims()):
                call.labels.mark(axis, f"{call.name} over the units")
    return [kept for _ in call.outputs]


def _reduced(call: Call) -> tuple[Axes, Axes]:
    axes, dims = call.axes(), set(call.dims())
    if len(axes) == len(call.shape):
        return axes, tuple(Fixed(1) if k in dims else axis for k, axis in enumerate(axes))
    return axes, tuple(axis for k, axis in enumerate(axes) if k not in dims)


def extreme(call: Call) -> Result:
    """Maximum or minimum along an axis; its indices pin the axis once they are read."""
    if len(call.outputs) == 1:
        return reduction(call)
    axes, kept = _reduced(call)
    gone = tuple(axes[k] for k in call.dims())
    for axis in gone:
        call.labels.mark(axis, f"{call.name} over the units")
    return [kept, Value(kept, pins=gone, why=f"the indices of {call.name}")]


def position(call: Call) -> Result:
    """Ops whose result depends on the order along the axis: it is pinned."""
    axes, dims = call.axes(), call.dims("dims") if "dims" in call.arguments else call.dims()
    for k in dims:
        call.labels.pin(axes[k])
    return [
        tuple(
            Fixed(size, call.name) if k in dims else axes[k] for k, size in enumerate(output.shape)
        )
        for output in call.outputs
    ]


def arg_position(call: Call) -> Result:
    """Return the number of a unit: its axis is pinned."""
    axes, kept = _reduced(call)
    for k in call.dims():
        call.labels.pin(axes[k])
    return kept


def gated(call: Call) -> Result:
    """One half of an axis gates the other, so the halves carry the same units."""
    axes, dim = call.axes(), call.dim()
    half = axes[dim].size // 2
    made = call.labels.merge(call.labels.cut(axes[dim], (half, half)))
    return (*axes[:dim], made, *axes[dim + 1 :])


_REDUCTIONS = (
    "mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "prod", "all", "any",
    "logsumexp", "linalg_vector_norm", "norm", "nansum", "count_nonzero", "aminmax",
)  # fmt: skip

REDUCE_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(("max", "min", "median"), extreme),
    **dict.fromkeys(
        ("sort", "topk", "cumsum", "cumprod", "logcumsumexp", "flip", "roll", "cummax"), position
    ),
    **dict.fromkeys(("argmax", "argmin"), arg_position),
    "glu": gated,
}
