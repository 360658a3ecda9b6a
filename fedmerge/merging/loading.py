"""A merged file back into the user's own model class, at the file's widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

from torch import Tensor, nn

from fedmerge.architecture.model_code import as_model_code
from fedmerge.architecture.tensor_names import model_names, shapes_for
from fedmerge.architecture.widths import resize_module
from fedmerge.checkpoint import Checkpoint, ReadOptions, from_state_dict, open_checkpoint
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging.result import Merge
from fedmerge.private_torch import ConvLayer
from fedmerge.user_code import load_state, parts_of
from fedmerge.values.option_fields import checked

Module = TypeVar("Module", bound=nn.Module)


@checked
def load_model(
    build: Callable[[], Module] | Module,
    source: str | Path | Merge | Mapping[str, Tensor],
    *,
    options: ReadOptions | None = None,
) -> Module:
    """Build the user's model at the widths of a merge and load it.

    `build` returns the model at its usual widths, or is one, which is copied; the source alone (a
    file, a merge or a state dict) says how wide it is now.
    """
    code = as_model_code(build, "build")
    return cast("Module", load_checkpoint(code.build, _opened(source, options or ReadOptions())))


def _opened(source: str | Path | Merge | Mapping[str, Tensor], options: ReadOptions) -> Checkpoint:
    if isinstance(source, Merge):
        return from_state_dict(source.state_dict(), name="the merge")
    if isinstance(source, Mapping):
        return from_state_dict(source, name="the state dict")
    if isinstance(source, str | Path):
        return open_checkpoint(Path(source), options)
    raise UsageError(
        f"`source` is {type(source).__name__}, expected a path, a merge or a state dict"
    )


def load_checkpoint(build: Callable[[], Module], checkpoint: Checkpoint) -> Module:
    """Build the user's model at the widths of an opened checkpoint and load its tensors."""
    module = build()
    names = model_names(checkpoint, module)
    try:
        resize_module(module, shapes_for(checkpoint, names))
        _check_kernels(module)
    except ArchitectureError as error:
        raise error.within(checkpoint.name) from error
    state = {of_model: checkpoint.read_torch(name) for name, of_model in names.items()}
    load_state(module, state)
    return module


def _check_kernels(module: nn.Module) -> None:
    """Refuse kernels of other sizes than the code's: no width, so padding would not follow."""
    for name, layer in parts_of(module):
        if not isinstance(layer, ConvLayer):
            continue
        found, expected = tuple(layer.weight.shape[2:]), tuple(layer.kernel_size)
        if found != expected:
            shown = ("×".join(map(str, sizes)) for sizes in (found, expected))
            raise ArchitectureError(
                "'{}.weight' has a {} kernel in the file and {} in the model".format(name, *shown),
                "build the model whose checkpoints were merged",
            )
