"""A merged file back into the user's own model class, at the file's widths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import nn

from fedmerge.checkpoint import ReadOptions, open_checkpoint
from fedmerge.graph.resize import resize_module
from fedmerge.workflow.models import model_names

Module = TypeVar("Module", bound=nn.Module)


def load_model(
    build: Callable[[], Module], path: str | Path, *, options: ReadOptions | None = None
) -> Module:
    """Build the user's model at the widths of a merged file and load the file into it.

    `build` returns the model at its usual widths; the file alone says how wide it is now.
    """
    checkpoint = open_checkpoint(Path(path), options or ReadOptions())
    module = build()
    names = model_names(checkpoint, module)
    shapes = {names[name]: info.shape for name, info in checkpoint.tensors.items()}
    resize_module(module, shapes)
    state = {names[name]: checkpoint.read_torch(name) for name in checkpoint.tensors}
    module.load_state_dict(state)
    return module
