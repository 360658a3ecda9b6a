"""A merged file back into the user's own model class, at the file's widths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import nn

from fedmerge.checkpoint import Checkpoint, ReadOptions, open_checkpoint
from fedmerge.errors import ArchitectureError
from fedmerge.graph.resize import resize_module
from fedmerge.user_code import load_state, parts_of
from fedmerge.workflow.models import model_names

Module = TypeVar("Module", bound=nn.Module)


def load_model(
    build: Callable[[], Module], path: str | Path, *, options: ReadOptions | None = None
) -> Module:
    """Build the user's model at the widths of a merged file and load the file into it.

    `build` returns the model at its usual widths; the file alone says how wide it is now.
    """
    return load_checkpoint(build, open_checkpoint(Path(path), options or ReadOptions()))


def load_checkpoint(build: Callable[[], Module], checkpoint: Checkpoint) -> Module:
    """Build the user's model at the widths of an opened checkpoint and load its tensors."""
    module = build()
    names = model_names(checkpoint, module)
    shapes = {names[name]: info.shape for name, info in checkpoint.tensors.items()}
    try:
        resize_module(module, shapes)
        _check_kernels(module)
    except ArchitectureError as error:
        raise error.within(checkpoint.name) from error
    state = {names[name]: checkpoint.read_torch(name) for name in checkpoint.tensors}
    load_state(module, state)
    return module


def _check_kernels(module: nn.Module) -> None:
    """Refuse kernels of other sizes than the code's: no width, so padding would not follow."""
    for name, layer in parts_of(module):
        if not isinstance(layer, nn.modules.conv._ConvNd):
            continue
        found, expected = tuple(layer.weight.shape[2:]), tuple(layer.kernel_size)
        if found != expected:
            shown = ("×".join(map(str, sizes)) for sizes in (found, expected))
            raise ArchitectureError(
                "'{}.weight' has a {} kernel in the file and {} in the model".format(name, *shown),
                "build the model whose checkpoints were merged",
            )
