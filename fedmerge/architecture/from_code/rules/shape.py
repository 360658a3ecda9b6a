"""Rules of operations that reshape, split, join or move axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from fedmerge.architecture.from_code.labels import (
    Axes,
    Fixed,
    Label,
    Labels,
    Same,
    Tree,
    concat,
    product,
)
from fedmerge.architecture.from_code.trace import Call, Result, Rule, Stacked, Value


def regroup(labels: Labels, axes: Sequence[Tree], shape: Sequence[int]) -> list[Tree]:
    """Return the labels of a row-major view; a chunk that doesn't align is pinned."""
    if not all(axis.size for axis in axes):
        for axis in axes:
            labels.pin(axis)
        return [Fixed(size) for size in shape]
    result: list[Tree] = [Fixed(1)] * len(shape)
    for before, after in chunks([axis.size for axis in axes], shape):
        tree = product(labels.resolve(axes[k]) for k in before)
        factors = labels.split(tree, [shape[k] for k in after]) if after else []
        for k, factor in zip(after, factors, strict=True):
            result[k] = factor
    return result


def chunks(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest runs of old and new axes with equal products (those of size 1 apart)."""
    before = [k for k, size in enumerate(old) if size != 1]
    after = [k for k, size in enumerate(new) if size != 1]
    while before:
        left, right = [before.pop(0)], [after.pop(0)]
        have, want = old[left[0]], new[right[0]]
        while have != want:
            if have < want:
                left.append(before.pop(0))
                have *= old[left[-1]]
            else:
                right.append(after.pop(0))
                want *= new[right[-1]]
        yield left, right


def regrouped_stack(call: Call, value: Value, shape: Sequence[int]) -> Value | None:
    """Return a stack's view that leaves the stacked axis alone, else nothing."""
    assert value.stacked is not None
    dim, old = value.stacked.dim, [axis.size for axis in value.axes]
    for left, right in chunks(old, shape):
        if dim in left and (left != [dim] or len(right) != 1):
            return None
        if dim in left:
            new = right[0]
    if old[dim] == 1:
        return None
    slices = tuple(
        (
            *regroup(call.labels, found[:dim], shape[:new]),
            *regroup(call.labels, found[dim:], shape[new + 1 :]),
        )
        for found in value.stacked.slices
    )
    others: list[Tree] = [call.labels.fresh(tree.size) for tree in slices[0]]
    axes = (*others[:new], Fixed(old[dim], "stack"), *others[new:])
    return Value(axes, Stacked(new, slices))


def split_stack(call: Call) -> Value | None:
    """Return a view as a stack where an earlier run showed that its slices are taken apart.

    Notes which axes a view splits off, so that a later `select` can tell.
    """
    sizes = list(call.first.shape)
    runs = [run for run in chunks(sizes, call.shape) if len(run[1]) > 1] if all(sizes) else []
    step = call.trace.steps
    for before, after in runs:
        for dim in after[:-1]:
            if (step, dim) in call.trace.sites:
                return _stack_from(call, before, after, dim)
    if runs:
        made = regroup(call.labels, call.axes(), call.shape)
        for dim in (dim for _, after in runs for dim in after[:-1]):
            tree = call.labels.resolve(made[dim])
            if isinstance(tree, Label):
                call.trace.split_at[tree.number] = (step, dim)
        return Value(tuple(made))
    return None


def _stack_from(call: Call, before: list[int], after: list[int], dim: int) -> Value:
    """Return a view whose positions along `dim` carry units of their own: outer × (q + k + v)."""
    axes, count = call.axes(), call.shape[dim]
    tree = product(call.labels.resolve(axes[k]) for k in before)
    outer = [call.shape[k] for k in after if k < dim]
    *slow, rest = call.labels.split(tree, (*outer, tree.size // prod(outer)))
    parts = call.labels.cut(rest, [rest.size // count] * count)
    left, right = (*axes[: before[0]], *slow), axes[before[-1] + 1 :]
    slices = tuple(
        (
            *regroup(call.labels, left, call.shape[:dim]),
            *regroup(call.labels, (part, *right), call.shape[dim + 1 :]),
        )
        for part in parts
    )
    others: list[Tree] = [call.labels.fresh(found.size) for found in slices[0]]
    stacked = (*others[:dim], Fixed(count, "stack"), *others[dim:])
    return Value(stacked, Stacked(dim, slices))


_STACK = Fixed(-1, "the stacked axis")  # its place while axes move


def _moved(call: Call, move: Callable[[Sequence[Tree]], Sequence[Tree]]) -> Result:
    """Move axes, those of a stack's slices too."""
    value = call.trace.look(call.first)
    if value.stacked is None:
        return Value(tuple(move(call.axes())), makers=None)
    dim, slices = value.stacked.dim, []
    for found in value.stacked.slices:
        moved = list(move([*found[:dim], _STACK, *found[dim:]]))
        if _STACK not in moved:
            return tuple(move(call.axes()))
        position = moved.index(_STACK)
        slices.append(tuple(moved[:position] + moved[position + 1 :]))
    return Value(tuple(move(value.axes)), Stacked(position, tuple(slices)))


def permute(call: Call) -> Result:
    """Reorder the axes."""
    return _moved(call, lambda axes: [axes[k] for k in call["dims"]])


def transpose(call: Call) -> Result:
    """Swap two axes (the two of a matrix by default)."""
    if call.first.dim() < 2:
        return call.axes()
    one = call.dim("dim0") if call.name.startswith("transpose") else 0
    other = call.dim("dim1") if call.name.startswith("transpose") else 1

    def swap(axes: Sequence[Tree]) -> Sequence[Tree]:
        swapped = list(axes)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        return swapped

    return _moved(call, swap)


def unsqueeze(call: Call) -> Result:
    """Add an axis of size 1."""
    dim = call["dim"] % (call.first.dim() + 1)
    return _moved(call, lambda axes: [*axes[:dim], Fixed(1), *axes[dim:]])


def squeeze(call: Call) -> Result:
    """Drop axes of size 1."""
    dims = call.dims() if call["dim"] is not None else range(call.first.dim())
    dropped = {d for d in dims if call.first.dim() and call.first.shape[d] == 1}
    return _moved(call, lambda axes: [axis for k, axis in enumerate(axes) if k not in dropped])


def view(call: Call) -> Result:
    """Regroup the axes by their prefix products."""
    value = call.trace.look(call.first)
    if value.stacked is not None:
        stacked = regrouped_stack(call, value, call.shape)
        if stacked is not None:
            return stacked
    return split_stack(call) or tuple(regroup(call.labels, call.axes(), call.shape))


def expand(call: Call) -> Result:
    """Repeat axes of size 1 without change."""
    axes = call.axes()
    padded = (*(Fixed(1),) * (len(call.shape) - len(axes)), *axes)
    return tuple(
        axis if axis.size == size else call.labels.same(size)
        for axis, size in zip(padded, call.shape, strict=True)
    )


def repeat(call: Call) -> Result:
    """Tile the axes."""
    axes = call.axes()
    counts = call["repeats"]
    padded = (*(Fixed(1),) * (len(counts) - len(axes)), *axes)
    return tuple(
        product((call.labels.same(count), axis)) if count * axis.size else Fixed(0)
        for count, axis in zip(counts, padded, strict=True)
    )


def select(call: Call) -> Result:
    """Take one position of an axis: a stack's own slice, else the axis is pinned."""
    value, dim = call.trace.look(call.first), call.dim()
    if value.stacked is not None and value.stacked.dim == dim:
        return value.stacked.slices[call["index"]]
    return _position(call, dim)


def unbind(call: Call) -> Result:
    """Take every position of an axis by itself."""
    value, dim = call.trace.look(call.first), call.dim(default=0)
    if value.stacked is not None and value.stacked.dim == dim:
        return list(value.stacked.slices)
    return [_position(call, dim) for _ in call.outputs]


def _position(call: Call, dim: int) -> Value:
    """Return one position of an axis, which is pinned once anything reads more than its shape.

    Notes where the axis was split off, so that its positions may go different ways.
    """
    axes = call.axes()
    tree = call.labels.resolve(axes[dim])
    site = call.trace.split_at.get(getattr(tree, "number", -1))
    if site is not None:
        call.trace.selected.add(site)
    return Value(axes[:dim] + axes[dim + 1 :], pins=(tree,), why=call.name)


def slice_axis(call: Call) -> Result:
    """Take a run of positions; with steps the axis is pinned."""
    value, dim = call.trace.look(call.first), call.dim(default=0)
    size, step = call.first.shape[dim], call["step"] or 1
    start, end, _ = slice(call["start"], call["end"]).indices(size)
    if value.stacked is not None and value.stacked.dim == dim:
        kept = value.stacked.slices[start:end:step]
        axes = (*value.axes[:dim], Fixed(len(kept)), *value.axes[dim + 1 :])
        return Value(axes, Stacked(dim, kept))
    axes = call.axes()
    if call.shape[dim] == size:
        return axes
    part = _stepped(call, axes[dim], dim) if step > 1 else _cut(call, axes[dim], start, end)
    return (*axes[:dim], part, *axes[dim + 1 :])


def _stepped(call: Call, axis: Tree, dim: int) -> Tree:
    if isinstance(call.labels.resolve(axis), Same):
        return call.labels.same(call.shape[dim])
    call.labels.pin(axis)
    return Fixed(call.shape[dim], call.name)


def _cut(call: Call, axis: Tree, start: int, end: int) -> Tree:
    end = max(start, end)
    return call.labels.cut(axis, (start, end - start, axis.size - end))[1]


def split(call: Call) -> Result:
    """Cut an axis into consecutive parts."""
    axes, dim = call.axes(), call.dim(default=0)
    sizes = [output.shape[dim] for output in call.outputs]
    parts = call.labels.cut(axes[dim], sizes)
    return [(*axes[:dim], part, *axes[dim + 1 :]) for part in parts]


def cat(call: Call) -> Result:
    """Join tensors along an axis."""
    tensors = [t for t in call["tensors"] if t.dim() == len(call.shape)]
    dim = (call["dim"] or 0) % len(call.shape)
    read = [call.trace.read(tensor) for tensor in tensors]
    for tensor in tensors:
        call.trace.use(tensor, "add")
    return tuple(
        concat(call.labels.resolve(axes[k]) for axes in read)
        if k == dim
        else call.labels.merge([axes[k] for axes in read])
        for k in range(len(call.shape))
    )


def stack(call: Call) -> Result:
    """Put tensors side by side along a new axis; they are tied only if read as a whole."""
    tensors = call["tensors"]
    dim = (call["dim"] or 0) % len(call.shape)
    for tensor in tensors:
        call.trace.use(tensor, "add")
    read = [map(call.labels.resolve, call.trace.read(tensor)) for tensor in tensors]
    return stacked_value(call, dim, [tuple(map(call.labels.thaw, axes)) for axes in read])


def stacked_value(call: Call, dim: int, slices: Sequence[Axes]) -> Value:
    """Return a stack of slices along an axis."""
    sizes = [tree.size for tree in slices[0]]
    others: list[Tree] = [call.labels.fresh(size) for size in sizes]
    axes = (*others[:dim], Fixed(len(slices), "stack"), *others[dim:])
    return Value(axes, Stacked(dim, tuple(slices)))


def as_complex(call: Call) -> Result:
    """Read the last axis, of size 2, as complex numbers."""
    axes = call.axes()
    call.labels.pin(axes[-1], "real and imaginary part")
    return axes[:-1]


def as_real(call: Call) -> Result:
    """Show complex numbers as a last axis of size 2."""
    return (*call.axes(), Fixed(2, "real and imaginary part"))


def strided(call: Call) -> Result:
    """Give the same elements other strides on axes of size 1; anything else is unknown."""
    tensor = call.first
    strides = zip(tensor.shape, call["size"], tensor.stride(), call["stride"], strict=True)
    is_same = all(old == new and (old == 1 or a == b) for old, new, a, b in strides)
    if not is_same or call["storage_offset"] not in (None, tensor.storage_offset()):
        raise ValueError("other elements")
    return call.axes()


def diagonal(call: Call) -> Result:
    """Take the diagonal of two axes, which then carry the same units."""
    axes, one, other = call.axes(), call.dim("dim1", 0), call.dim("dim2", 1)
    kept = [axis for k, axis in enumerate(axes) if k not in (one, other)]
    if axes[one].size == axes[other].size and not call["offset"]:
        return (*kept, call.labels.merge((axes[one], axes[other])))
    call.labels.pin(axes[one])
    call.labels.pin(axes[other])
    return (*kept, Fixed(call.shape[-1]))


SHAPE_RULES: Mapping[str, Rule] = {
    "permute": permute,
    "transpose": transpose,
    "t": transpose,
    "numpy_T": transpose,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), view),
    "expand": expand,
    "repeat": repeat,
    "select": select,
    "unbind": unbind,
    "slice": slice_axis,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "chunk",
                     "unsafe_split_with_sizes"), split),
    "as_strided": strided,
    "view_as_complex": as_complex,
    "view_as_real": as_real,
    "diagonal": diagonal,
    "cat": cat,
    "stack": stack,
}  # fmt: skip
