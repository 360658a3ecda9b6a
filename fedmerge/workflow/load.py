"""A merged file back into the user's own model class, at the file's widths."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from torch import nn

from fedmerge.checkpoint import Checkpoint, ReadOptions, open_checkpoint
from fedmerge.errors import ArchitectureError
from fedmerge.graph.resize import resize_module
from fedmerge.workflow.clients import name_difference

Module = TypeVar("Module", bound=nn.Module)


def load_model(
    build: Callable[[], Module], path: str | Path, *, options: ReadOptions | None = None
) -> Module:
    """Build the user's model at the widths of a merged file and load the file into it.

    `build` returns the model at its usual widths; the file alone says how wide it is now.
    """
    checkpoint = open_checkpoint(Path(path), options or ReadOptions())
    module = build()
    names = _model_names(checkpoint, module.state_dict().keys())
    shapes = {names[name]: info.shape for name, info in checkpoint.tensors.items()}
    resize_module(module, shapes)
    state = {names[name]: checkpoint.read_torch(name) for name in checkpoint.tensors}
    module.load_state_dict(state)
    return module


def _model_names(checkpoint: Checkpoint, expected: Collection[str]) -> dict[str, str]:
    """Return the model's name of every tensor of the file."""
    written = {name: checkpoint.output_name(name) for name in checkpoint.tensors}
    plain = {name: name for name in checkpoint.tensors}
    for names in (written, plain):
        if set(names.values()) == set(expected):
            return names
    difference = name_difference(plain.values(), expected)
    raise ArchitectureError(
        f"{checkpoint.name}: {difference}, compared with the model",
        "build the model whose checkpoints were merged",
    )
