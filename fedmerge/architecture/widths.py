"""Widths of groups: solved from tensor shapes, and given to a module in place."""

from __future__ import annotations

import re
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from fedmerge.errors import ArchitectureError
from fedmerge.private_torch import StatisticsNormLayer, TransposedConvLayer
from fedmerge.user_code import user_code
from fedmerge.values.plans import (
    Concat,
    Layout,
    Pinned,
    Plan,
    Product,
    Units,
    axis_size,
    groups_in,
    replace_groups,
)

Shapes = Mapping[str, tuple[int, ...]]
_Axis = tuple[str, int, Layout, int]  # tensor, axis, layout, size
_SAME_NET = "all clients must share one architecture; compare them with `fedmerge inspect`"


def solve_widths(plan: Plan, shapes: Shapes, *, source: str) -> dict[str, int]:
    """Return every group's width in a client, or say which axis of it contradicts the plan.

    Groups that must be equally wide are solved as one: of two halves only the sum may show. Of a
    product of two groups only the whole shows, so the plan gives one group's width.
    """
    first = {group: tie[0] for tie in plan.same_width for group in tie}
    given = {first.get(g.name, g.name): g.width for g in plan.groups if g.width is not None}
    solved = _solve_groups(_with_names(plan, first), given, shapes, source)
    return {group.name: solved[first.get(group.name, group.name)] for group in plan.groups}


def _with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan with groups renamed; groups of one name are one."""
    if not names:
        return plan

    def renamed(group: str) -> Layout:
        return Units(names.get(group, group))

    tensors = {
        name: replace(tensor, axes=tuple(replace_groups(axis, renamed) for axis in tensor.axes))
        for name, tensor in plan.tensors.items()
    }
    groups = tuple(g for g in plan.groups if names.get(g.name, g.name) == g.name)
    return replace(plan, groups=groups, tensors=tensors)


def _solve_groups(
    plan: Plan, given: Mapping[str, int], shapes: Shapes, source: str
) -> dict[str, int]:
    _check_dimensions(plan, shapes, source)
    axes: list[_Axis] = [
        (name, axis, layout, shapes[name][axis])
        for name, tensor in plan.tensors.items()
        for axis, layout in enumerate(tensor.axes)
    ]
    widths = _solved_widths(axes, given)
    _check_solved(plan, widths, axes, source)
    for name, axis, layout, size in axes:
        if axis_size(layout, widths) != size:
            raise ArchitectureError(
                f"{source}: '{name}' has size {size} along axis {axis}, "
                f"expected {describe(layout, widths)}",
                _SAME_NET,
            )
    return widths


def _solved_widths(axes: Sequence[_Axis], given: Mapping[str, int]) -> dict[str, int]:
    """Return the widths that follow from axes with one unknown group, and from one another."""
    widths = dict(given)
    unknown = [set(groups_in(layout)) - given.keys() for _, _, layout, _ in axes]
    carriers: dict[str, list[int]] = {}
    for number, groups in enumerate(unknown):
        for group in groups:
            carriers.setdefault(group, []).append(number)
    waiting = deque(range(len(axes)))
    while waiting:
        number = waiting.popleft()
        _, _, layout, size = axes[number]
        width = _solve(layout, size, widths) if len(unknown[number]) == 1 else None
        if width is None:
            continue
        [solved] = unknown[number]
        widths[solved] = width
        for other in carriers[solved]:
            unknown[other].discard(solved)
            waiting.append(other)
    return widths


def describe(layout: Layout, widths: Mapping[str, int]) -> str:
    """Return an axis's expected size in words, e.g. `800 (conv2's 50 units × 16)`."""
    size = axis_size(layout, widths)
    return f"{size} ({_words(layout, widths)})"


def _words(layout: Layout, widths: Mapping[str, int]) -> str:
    match layout:
        case Units(group):
            return f"{group}'s {widths[group]} units" if group in widths else f"{group}'s units"
        case Pinned(size, reason):
            return f"{reason} {size}" if reason else str(size)
        case Product(factors):
            return " × ".join(_words(factor, widths) for factor in factors)
        case Concat(parts):
            return " + ".join(_words(part, widths) for part in parts)


def _solve(layout: Layout, size: int, widths: dict[str, int]) -> int | None:
    """Return the one unknown group's width that gives the axis its size, if there is one.

    The size is linear in the width, so two evaluations fix it.
    """
    unknown = next(group for group in groups_in(layout) if group not in widths)
    at_zero = axis_size(layout, ChainMap({unknown: 0}, widths))
    slope = axis_size(layout, ChainMap({unknown: 1}, widths)) - at_zero
    if slope <= 0 or (size - at_zero) % slope or size <= at_zero:
        return None
    return (size - at_zero) // slope


def _check_dimensions(plan: Plan, shapes: Shapes, source: str) -> None:
    for name, tensor in plan.tensors.items():
        if name not in shapes:
            raise ArchitectureError(
                f"{source}: has no tensor '{name}', which the plan describes",
                "a plan must name the tensors of the files it is used for; see `fedmerge inspect`",
            )
        if len(shapes[name]) != len(tensor.axes):
            raise ArchitectureError(
                f"{source}: '{name}' has {len(shapes[name])} axes, expected {len(tensor.axes)}",
                _SAME_NET,
            )


def _check_solved(
    plan: Plan, widths: Mapping[str, int], axes: Sequence[_Axis], source: str
) -> None:
    """Refuse a plan with groups left unsolved: no width of theirs fits, or several would."""
    unsolved = {group.name: None for group in plan.groups if group.name not in widths}
    if not unsolved:
        return
    for name, axis, layout, size in axes:
        if len({group for group in groups_in(layout) if group in unsolved}) == 1:
            raise ArchitectureError(
                f"{source}: '{name}' has size {size} along axis {axis}, "
                f"which is no {_words(layout, widths)}",
                _SAME_NET,
            )
    raise ArchitectureError(
        f"the plan does not fix the width of group '{next(iter(unsolved))}'",
        "give the group a tensor axis of its own, or its 'width' in the plan's 'groups'",
    )


def count_parameters(plan: Plan, widths: Mapping[str, int]) -> int:
    """Return how many numbers the plan's tensors hold at the given widths."""
    return sum(
        reduce(lambda count, axis: count * axis_size(axis, widths), tensor.axes, 1)
        for tensor in plan.tensors.values()
    )


def resize_module(module: nn.Module, shapes: Shapes) -> None:
    """Resize a module in place so that its parameters and buffers have the given shapes.

    New tensors are uninitialised; a tied one changes under all of its names. Integer attributes of
    the user's own modules that equal an old width (`self.hidden_size`) follow it where that is
    unambiguous, and numbers of heads.
    """
    what = "the model can't be brought to other widths"
    with user_code(what, of=module):
        parts = list(module.named_modules())
        layers = [layer for _, layer in parts]
        old_shapes = {name: tuple(tensor.shape) for name, tensor in _all_tensors(module)}
        old_states = _state_sizes(layers)
        shapes = {**_shapes_of_tied(module, shapes), **shapes}
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, shape in shapes.items():
        _check_axes(name, old_shapes.get(name), shape)
        if old_shapes[name] != shape:
            with user_code(what, of=module):
                _replace_tensor(module, name, shape, replaced)
    with user_code(what, of=module):
        for layer in layers:
            if (resize := _resizer(layer)) is not None:
                resize(layer)
        new_states = _state_sizes(layers)
    moved_states = _unambiguous(zip(old_states, new_states, strict=True))
    _follow_widths(parts, (old_shapes, shapes), moved_states)


def _all_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(remove_duplicate=False)]
    return [*named, *module.named_buffers(remove_duplicate=False)]


def _shapes_of_tied(module: nn.Module, shapes: Shapes) -> Shapes:
    """Return the shapes of parameters that have one under another of their names."""
    named = dict(module.named_parameters(remove_duplicate=False))
    known = {id(named[name]): shape for name, shape in shapes.items() if name in named}
    return {name: known[id(own)] for name, own in named.items() if id(own) in known}


def _replace_tensor(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    """Replace one tensor by an empty one; a parameter with several names stays one parameter.

    `replaced` keeps the old parameters beside the new ones, so that their ids stay theirs.
    """
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    old: Any = getattr(owner, leaf)
    if tuple(old.shape) == shape:  # a shared module, reached under another name before
        return
    if not isinstance(old, nn.Parameter):
        setattr(owner, leaf, torch.empty(shape, dtype=old.dtype, device=old.device))
        return
    if id(old) not in replaced:
        empty = torch.empty(shape, dtype=old.dtype, device=old.device)
        replaced[id(old)] = (old, nn.Parameter(empty, requires_grad=old.requires_grad))
    setattr(owner, leaf, replaced[id(old)][1])


def _check_axes(name: str, old: tuple[int, ...] | None, new: tuple[int, ...]) -> None:
    if old is None:
        raise ArchitectureError(
            f"the model's state dict has '{name}', which is no parameter or buffer of it"
        )
    if len(old) != len(new):
        raise ArchitectureError(
            f"'{name}' has {len(new)} axes in the file and {len(old)} in the model",
            "build the model whose checkpoints were merged",
        )


def _resize_linear(layer: Any) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


def _resize_conv(layer: Any) -> None:
    if layer.groups == layer.in_channels > 1:  # depthwise: every channel is a group of its own
        layer.groups = layer.weight.shape[0] * layer.groups // layer.out_channels
    layer.out_channels = layer.weight.shape[0]
    layer.in_channels = layer.weight.shape[1] * layer.groups


def _resize_transposed_conv(layer: Any) -> None:
    if layer.groups == layer.in_channels > 1:
        layer.groups = layer.weight.shape[0]
    layer.in_channels = layer.weight.shape[0]
    layer.out_channels = layer.weight.shape[1] * layer.groups


def _resize_statistics_norm(layer: Any) -> None:
    sized = layer.weight if layer.weight is not None else layer.running_mean
    if sized is not None:
        layer.num_features = sized.shape[0]


def _resize_layer_norm(layer: Any) -> None:
    if layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)


def _resize_group_norm(layer: Any) -> None:
    if layer.weight is not None:
        layer.num_channels = layer.weight.shape[0]


def _resize_embedding(layer: Any) -> None:
    layer.num_embeddings, layer.embedding_dim = layer.weight.shape


def _resize_recurrent(layer: Any) -> None:
    layer.input_size = layer.weight_ih_l0.shape[1]
    state = layer.weight_hh_l0.shape[1]
    if layer.proj_size:
        layer.proj_size, layer.hidden_size = state, layer.weight_hr_l0.shape[1]
    else:
        layer.hidden_size = state
    layer.flatten_parameters()


def _resize_cell(layer: Any) -> None:
    layer.input_size, layer.hidden_size = layer.weight_ih.shape[1], layer.weight_hh.shape[1]


def _resize_attention(layer: Any) -> None:
    """Follow the width of the queries; the number of heads is the code's, as no shape shows it.

    PyTorch asks for heads × units per head as wide as the queries, the stream that they come from.
    """
    stacked = layer.in_proj_weight
    query, key, value = (
        (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        if stacked is None
        else (stacked, stacked, stacked)
    )
    layer.embed_dim, layer.kdim, layer.vdim = query.shape[1], key.shape[1], value.shape[1]
    layer.head_dim = layer.embed_dim // layer.num_heads


def _resize_slopes(layer: Any) -> None:
    layer.num_parameters = layer.weight.shape[0]


_RESIZERS: Mapping[type[nn.Module], Callable[[Any], None]] = {
    nn.Linear: _resize_linear,
    nn.Conv1d: _resize_conv,
    nn.Conv2d: _resize_conv,
    nn.Conv3d: _resize_conv,
    TransposedConvLayer: _resize_transposed_conv,
    StatisticsNormLayer: _resize_statistics_norm,
    nn.LayerNorm: _resize_layer_norm,
    nn.RMSNorm: _resize_layer_norm,
    nn.GroupNorm: _resize_group_norm,
    nn.Embedding: _resize_embedding,
    nn.EmbeddingBag: _resize_embedding,
    nn.RNNBase: _resize_recurrent,
    nn.RNNCellBase: _resize_cell,
    nn.PReLU: _resize_slopes,
    nn.MultiheadAttention: _resize_attention,
}


def _resizer(layer: nn.Module) -> Callable[[Any], None] | None:
    return next((_RESIZERS[kind] for kind in type(layer).__mro__ if kind in _RESIZERS), None)


def _moved_widths(old_shapes: Shapes, shapes: Shapes, path: str) -> dict[int, int]:
    """Return old → new for every axis size of a part that moved, always to the same new size.

    Elsewhere in the model the same number may be another width; a part without tensors has none
    of its own, and may use any.
    """
    own = [name for name in shapes if not path or name.startswith(f"{path}.")]
    return _unambiguous(
        pair for name in own or shapes for pair in zip(old_shapes[name], shapes[name], strict=True)
    )


def _unambiguous(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return old → new for the old sizes that have one new size, another one."""
    moves: dict[int, set[int]] = {}
    for old, new in pairs:
        moves.setdefault(old, set()).add(new)
    return {old: new for old, (new, *others) in moves.items() if not others and new != old}


_COUNTS_HEADS = re.compile(r"heads$|^n\w*head$|heads?_(count|num)$", re.IGNORECASE)
_IN_A_HEAD = re.compile("dim|size|width|channels|per_", re.IGNORECASE)


def _first_made(old_shapes: Shapes, shapes: Shapes, path: str) -> tuple[int, int]:
    """Return how many numbers the first weight of a part makes, before and after.

    Code of attention makes queries first, and reads what it attended to last.
    """
    own = [name for name in shapes if not path or name.startswith(f"{path}.")]
    weights = ((old_shapes[n][0], shapes[n][0]) for n in own if len(shapes[n]) > 1)
    return next(weights, (0, 0))


def _moved_heads(heads: int, made: tuple[int, int]) -> dict[int, int]:
    """Return heads → new heads where so many of them make what a weight makes, as wide as before.

    The scale of attention goes by the units per head, so heads grow in number.
    """
    old, new = made
    if not heads or not old or old % heads or new % (old // heads):
        return {}
    return {heads: new // (old // heads)}


def _state_sizes(layers: Sequence[nn.Module]) -> list[int]:
    """Return the hidden sizes of the recurrent layers."""
    recurrent = (nn.RNNBase, nn.RNNCellBase)
    return [layer.hidden_size for layer in layers if isinstance(layer, recurrent)]


def _follow_widths(
    parts: Sequence[tuple[str, nn.Module]],
    resized: tuple[Shapes, Shapes],
    moved_states: Mapping[int, int],
) -> None:
    """Set the users' integers; one that is called hidden follows the recurrent layers.

    One that counts heads follows what the first weight makes: heads × units per head.
    """
    for path, layer in parts:
        integers = {name: value for name, value in vars(layer).items() if type(value) is int}
        if type(layer).__module__.startswith("torch.") or not integers:
            continue
        moved = _moved_widths(*resized, path)
        made = _first_made(*resized, path)
        for name, value in integers.items():
            moves = {**moved, **moved_states} if "hid" in name.lower() else moved
            if _COUNTS_HEADS.search(name) and not _IN_A_HEAD.search(name):
                moves = {**moves, **_moved_heads(value, made)}
            if value in moves:
                with user_code(f"'{name}' of {type(layer).__name__} can't follow its width"):
                    setattr(layer, name, moves[value])
