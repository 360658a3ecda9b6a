"""Named arrays into a module and out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.types.arrays import Array
from fedmerge.types.work import Arrays
from fedmerge.user_code import state_of

_MOST_NAMES = 5  # in a message


def load_arrays(model: nn.Module, arrays: Arrays) -> None:
    """Copy arrays into the module's parameters and buffers; every one must be given a value.

    Tied tensors may be given by any one of their names.
    """
    tensors = named_tensors(model)
    if unknown := [name for name in arrays if name not in tensors]:
        raise TrainingError(f"the model has no {_quoted(unknown)}")
    given = {_memory(tensors[name]) for name in arrays}
    missing = [name for name, tensor in tensors.items() if _memory(tensor) not in given]
    if missing:
        raise TrainingError(f"there are no values for the model's {_quoted(missing)}")
    for name, array in arrays.items():
        if tensors[name].shape != array.shape:
            found = tuple(tensors[name].shape)
            raise TrainingError(f"the model's '{name}' is {found}, expected {array.shape}")
        tensors[name].copy_(torch.tensor(np.asarray(array)))


def read_arrays(model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Array]:
    """Return copies of the module's tensors, tied ones once, without some names.

    Half-precision tensors are widened to float32, which numpy knows.
    """
    tensors = named_tensors(model)
    seen = {_memory(tensors[name]) for name in without if name in tensors}
    arrays: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if _memory(tensor) in seen:
            continue
        seen.add(_memory(tensor))
        wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        arrays[name] = wide.cpu().numpy().copy()
    return arrays


def named_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors of the module's state, sharing its memory."""
    state = state_of(model)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for two names of one tensor only."""
    if not tensor.numel():
        return (id(tensor),)  # it has no memory to tell it by
    return (tensor.data_ptr(), tensor.shape, tensor.stride())


def _quoted(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
