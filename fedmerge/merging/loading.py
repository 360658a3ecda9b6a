"""A merged file back into the user's own model class, at the file's widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from fedmerge.architecture.model_code import as_model_code
from fedmerge.architecture.tensor_names import Module, load_checkpoint
from fedmerge.checkpoint import Checkpoint, ReadOptions, from_state_dict, open_checkpoint
from fedmerge.errors import UsageError
from fedmerge.merging.result import Merge
from fedmerge.values.option_fields import checked


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
