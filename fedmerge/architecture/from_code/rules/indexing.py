"""Ops that pick positions by number: the indexed axis is pinned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedmerge.architecture.from_code.labels import Axes, Fixed, Tree
from fedmerge.architecture.from_code.trace import Call, Result, Rule


def embedding(call: Call) -> Result:
    """Look up rows of a table."""
    table, rows = call.trace.read(call["weight"]), call.trace.read(call["indices"])
    call.labels.pin(table[0], "tokens")
    call.trace.use(call["weight"], "look up")
    return (*rows, table[1])


def embedding_bag(call: Call) -> Result:
    """Reduce looked-up rows of a table bag by bag."""
    table = call.trace.read(call["weight"])
    call.labels.pin(table[0], "tokens")
    call.trace.use(call["weight"], "look up")
    for name in ("indices", "offsets", "per_sample_weights"):
        if (tensor := call.tensor(name)) is not None:
            _pin_all(call, tensor)
    others = [tuple(Fixed(size) for size in t.shape) for t in call.outputs[1:]]
    return [(Fixed(call.shape[0]), table[1]), *others]


def index(call: Call) -> Result:
    """Pick by tensors of indices along some axes."""
    axes = call.axes()
    return _indexed(call, axes, call["indices"])


def _indexed(call: Call, axes: Axes, indices: list[Tensor | None]) -> Axes:
    picked, rank = _picked_axes(indices)
    for tensor in indices:
        if tensor is not None:
            _pin_all(call, tensor)
    for k in picked:
        call.labels.pin(axes[k])
    kept = [axis for k, axis in enumerate(axes) if k not in picked]
    together = picked == list(range(picked[0], picked[-1] + 1))
    place = picked[0] if together else 0
    shape = call.shape[place : place + rank] if call.name == "index" else (1,) * rank
    return (*kept[:place], *(Fixed(size) for size in shape), *kept[place:])


def _picked_axes(indices: list[Tensor | None]) -> tuple[list[int], int]:
    """Return which axes are indexed, and how many axes take their place."""
    picked: list[int] = []
    ranks = [0]
    axis = 0
    for tensor in indices:
        if tensor is None:
            axis += 1
            continue
        is_mask = tensor.dtype.is_floating_point is False and str(tensor.dtype) == "torch.bool"
        width = tensor.dim() if is_mask else 1
        ranks.append(1 if is_mask else tensor.dim())
        picked += range(axis, axis + width)
        axis += width
    return picked, max(ranks)


def index_put(call: Call) -> Result:
    """Write values at indices; the axes that are not indexed carry the values' units."""
    if call.name.endswith("_"):
        call.trace.write(call.first, None)
    own = tuple(map(call.labels.thaw, map(call.labels.resolve, call.axes())))
    target = _indexed(call, own, call["indices"])
    values = call.trace.read(call["values"])
    for back in range(1, min(len(values), len(target)) + 1):
        one, other = target[-back], values[-back]
        if one.size == other.size and one.size > 1:
            call.labels.unify(one, other)
        else:
            call.labels.pin(other)
    return own


def index_select(call: Call) -> Result:
    """Pick positions along one axis."""
    axes, dim = call.axes(), call.dim()
    call.labels.pin(axes[dim])
    _pin_all(call, call["index"])
    return (*axes[:dim], Fixed(call.shape[dim]), *axes[dim + 1 :])


def gather(call: Call) -> Result:
    """Pick along one axis by an index of the result's shape."""
    axes, dim, chosen = call.axes(), call.dim(), call.trace.read(call["index"])
    call.labels.pin(axes[dim])
    result: list[Tree] = []
    for k, (axis, own) in enumerate(zip(axes, chosen, strict=True)):
        if k != dim and axis.size == own.size:
            result.append(call.labels.merge((axis, own)))
        else:
            call.labels.pin(axis)
            result.append(own)
    return tuple(result)


def scattered(call: Call) -> Result:
    """Write at indices along one axis: it is pinned, the others carry the same units."""
    axes, dim = list(call.axes()), call.dim()
    for tensor in call.tensors()[1:]:
        given = call.trace.read(tensor)
        for k, axis in enumerate(given):
            if len(given) == len(axes) and k != dim and axis.size == axes[k].size:
                axes[k] = call.labels.merge((axes[k], axis))
            else:
                call.labels.pin(axis)
                if len(given) == len(axes):
                    call.labels.pin(axes[k])
                    axes[k] = Fixed(axes[k].size, call.name)
    call.labels.pin(axes[dim])
    axes[dim] = Fixed(axes[dim].size, call.name)
    return tuple(axes)


def triangle(call: Call) -> Result:
    """Zero one side of a matrix's diagonal, so that both axes are pinned."""
    axes = call.axes()
    for axis in axes[-2:]:
        call.labels.pin(axis)
    return (*axes[:-2], *(Fixed(size, "triangle") for size in call.shape[-2:]))


def _pin_all(call: Call, tensor: Tensor) -> None:
    for axis in call.trace.read(tensor):
        call.labels.pin(axis)


INDEXING_RULES: Mapping[str, Rule] = {
    "embedding": embedding,
    "_embedding_bag": embedding_bag,
    "_embedding_bag_forward_only": embedding_bag,
    "index": index,
    "index_put": index_put,
    "index_put_": index_put,
    "index_select": index_select,
    "gather": gather,
    **dict.fromkeys(
        ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"), scattered
    ),
    "tril": triangle,
    "triu": triangle,
}
