"""The first client's folder: the code that its config.json means, and widths that it can say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedmerge.architecture.from_library import (
    ConfiguredModel,
    SaidWidth,
    code_of_folder,
    held_to_config,
    said_widths,
)
from fedmerge.architecture.model_code import PROBE_BATCH, ModelCode
from fedmerge.architecture.tensor_names import model_names, renamed, shapes_for
from fedmerge.checkpoint import Checkpoint, ModelFolder, model_folder
from fedmerge.errors import ArchitectureError, UserCodeError
from fedmerge.values.plans import Plan


def folder_code(folder: ModelFolder, *, is_planned: bool = False) -> ModelCode | None:
    """Return the code that a folder's config.json stands for; None where no library knows it.

    A plan that is given does without a library that is not installed.
    """
    found = code_of_folder(folder)
    if found is None or (is_planned and not found.is_installed):
        return None
    shape = found.input_shape
    shapes = () if shape is None else ((PROBE_BATCH, *shape),)
    return ModelCode(found.reference, found.arguments, shapes)


def library_names(client: Checkpoint) -> dict[str, str] | None:
    """Return what its library's loader calls a folder's tensors; None where it does not load it."""
    folder = model_folder(client.path)
    code = None if folder is None else folder_code(folder)
    try:
        model = None if code is None else code.template
        return model_names(client, model) if isinstance(model, ConfiguredModel) else None
    except (ArchitectureError, UserCodeError):
        return None


@dataclass(frozen=True)
class FolderConfig:
    """The code of the folder that the first client is, whose config.json has to say the widths."""

    code: ModelCode | None  # None: nothing is known that could build it
    said: tuple[SaidWidth, ...] = ()  # the widths that it can say

    def if_built(self) -> FolderConfig:
        """Return the folder's own code only if its model can be built: others may run clients."""
        if self.code is None:
            return self
        try:
            assert self.code.template is not None
        except (ArchitectureError, UserCodeError):
            return FolderConfig(None)
        return self

    def holding(self, plan: Plan, client: Checkpoint) -> tuple[Plan, FolderConfig]:
        """Return a plan that grows only as config.json can say, and with which fields."""
        model = None if self.code is None else self.code.template
        if not isinstance(model, ConfiguredModel):
            return held_to_config(plan, ()), self
        names = model_names(client, model)
        read = {name: tensor for name, tensor in plan.tensors.items() if name in names}
        own = renamed(replace(plan, tensors=read, norms=()), names)
        said = said_widths(model, own, shapes_for(client, names), client.name)
        return held_to_config(plan, said), replace(self, said=said)
