"""Views of stacks, and views that make one: stacked q, k, v that later go their own ways."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fedmerge.graph.model.call import Call
from fedmerge.graph.model.rules.views import chunks, regroup
from fedmerge.graph.model.trace import Stacked, Value
from fedmerge.graph.model.trees import Fixed, Label, Tree, product


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
