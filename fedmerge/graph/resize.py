"""Give a module other widths in place: its tensors, its layers' sizes, its own integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from fedmerge.errors import ArchitectureError
from fedmerge.user_code import user_code

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def resize_module(module: nn.Module, shapes: Shapes) -> None:
    """Resize a module in place so that its parameters and buffers have the given shapes.

    New tensors are uninitialised. Integer attributes of the user's own modules that equal an old
    width (`self.hidden_size`) follow it where that is unambiguous.
    """
    what = "the model can't be brought to other widths"
    with user_code(what, of=module):
        parts = list(module.named_modules())
        layers = [layer for _, layer in parts]
        old_shapes = {name: tuple(tensor.shape) for name, tensor in _all_tensors(module)}
        old_states = _state_sizes(layers)
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, shape in shapes.items():
        _check_dimensions(name, old_shapes.get(name), shape)
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


def _check_dimensions(name: str, old: tuple[int, ...] | None, new: tuple[int, ...]) -> None:
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
    nn.modules.conv._ConvTransposeNd: _resize_transposed_conv,
    nn.modules.batchnorm._NormBase: _resize_statistics_norm,
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


def _state_sizes(layers: Sequence[nn.Module]) -> list[int]:
    """Return the hidden sizes of the recurrent layers."""
    recurrent = (nn.RNNBase, nn.RNNCellBase)
    return [layer.hidden_size for layer in layers if isinstance(layer, recurrent)]


def _follow_widths(
    parts: Sequence[tuple[str, nn.Module]],
    resized: tuple[Shapes, Shapes],
    moved_states: Mapping[int, int],
) -> None:
    """Set the users' integers; one that is called hidden follows the recurrent layers."""
    for path, layer in parts:
        integers = {name: value for name, value in vars(layer).items() if type(value) is int}
        if type(layer).__module__.startswith("torch.") or not integers:
            continue
        moved = _moved_widths(*resized, path)
        for name, value in integers.items():
            moves = {**moved, **moved_states} if "hid" in name.lower() else moved
            if value in moves:
                with user_code(f"'{name}' of {type(layer).__name__} can't follow its width"):
                    setattr(layer, name, moves[value])
