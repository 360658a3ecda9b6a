"""Named arrays into a module and out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.types.arrays import Array, DType
from fedmerge.types.work import Arrays
from fedmerge.user_code import optional_tensors, state_of

_MOST_NAMES = 5  # in a message


def load_arrays(model: nn.Module, arrays: Arrays) -> frozenset[str]:
    """Copy arrays into the module's parameters and buffers; every one must be given a value.

    Tied tensors may be given by any one of their names. Returns the names of those that torch
    does without when it loads a file, and that have no value here.
    """
    tensors = named_tensors(model)
    if unknown := [name for name in arrays if name not in tensors]:
        raise TrainingError(f"the model has no {_quoted(unknown)}")
    given = {_memory(tensors[name]) for name in arrays}
    missing = [name for name, tensor in tensors.items() if _memory(tensor) not in given]
    optional = optional_tensors(model) if missing else frozenset()
    if needed := [name for name in missing if name not in optional]:
        raise TrainingError(f"there are no values for the model's {_quoted(needed)}")
    for name, array in arrays.items():
        if tensors[name].shape != array.shape:
            found = tuple(tensors[name].shape)
            raise TrainingError(f"the model's '{name}' is {found}, expected {array.shape}")
        tensors[name].copy_(torch.tensor(np.asarray(array)))
    return frozenset(missing)


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
        arrays[name] = _as_array(tensor).copy()
    return arrays


def array_dtypes(model: nn.Module) -> dict[str, DType]:
    """Return the types of the arrays that `read_arrays` gives, for all names of tied tensors."""
    return {
        name: _as_array(tensor[:0] if tensor.ndim else tensor).dtype
        for name, tensor in named_tensors(model).items()
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of every tensor of the module's state, by any of its names."""
    firsts: dict[tuple[object, ...], str] = {}
    return {
        name: firsts.setdefault(_memory(tensor), name)
        for name, tensor in named_tensors(model).items()
    }


def _as_array(tensor: torch.Tensor) -> Array:
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    array: Array = wide.cpu().numpy()
    return array


def named_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors of the module's state, sharing its memory."""
    return state_of(model)


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for two names of one tensor only."""
    if not tensor.numel():
        return (id(tensor),)  # it has no memory to tell it by
    return (tensor.data_ptr(), tensor.shape, tensor.stride())


def _quoted(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
