"""A model's module: copies of it, its float tensors, and the tensors that it returns."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedmerge.errors import ArchitectureError
from fedmerge.user_code import copied_object, own_code, state_of, user_code

StatePairs = Sequence[tuple[int, int]]  # forward's argument i is output j of the step before


def evaluating(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode; an exported program is in the mode it was made in."""
    what = "the model can't be put into evaluation mode"
    with user_code(what, of=model), suppress(NotImplementedError):
        model.eval()
    return model


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU, in evaluation mode."""
    hint = "build it without tensors that carry a graph, and on the CPU"
    with user_code("the model cannot be copied", of=model, hint=hint):
        computed = _computed_tensors(list(model.modules()))
        with torch.no_grad(), warnings.catch_warnings():  # scripted parameters carry no graph then
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, for exported programs
            return evaluating(copied_object(model, computed).to("cpu"))


def _computed_tensors(parts: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return copies of tensors that hooks leave on modules (pruned weights), which have a graph."""
    with own_code():
        attributes = [value for part in parts for value in vars(part).values()]
        computed = [v for v in attributes if isinstance(v, Tensor) and not v.is_leaf]
        return {id(tensor): tensor.detach().clone() for tensor in computed}


def float_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the float tensors of a state dict by their first name, and the other names."""
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_of(module, keep_vars=True).items():
        if not tensor.is_floating_point():
            continue
        key = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor
    return tensors, aliases


def plain_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor of a model's outputs as plain numbers that can be compared."""
    kinds = {"nested": tensor.is_nested, "meta": tensor.is_meta, "quantized": tensor.is_quantized}
    found = next((kind for kind, is_so in kinds.items() if is_so), None)
    if found is None and tensor.layout != torch.strided:
        found = str(tensor.layout).removeprefix("torch.")
    if found is not None:
        raise ArchitectureError(f"the model returns a {found} tensor, expected plain numbers")
    return tensor.as_subclass(Tensor)


def tensor_leaves(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and plain objects."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += [t for item in vars(leaf).values() for t in tensor_leaves(item)]
    return found
