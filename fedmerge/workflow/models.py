"""The user's model code: built, brought to a client's widths, planned and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.graph.model import (
    deduce_inputs,
    load_factory,
    plan_model,
    probe_growth,
    verify_plan,
)
from fedmerge.graph.resize import resize_module
from fedmerge.types.plans import Norm, Plan
from fedmerge.workflow.clients import name_difference


@dataclass(frozen=True)
class ModelCode:
    """Where the user's model comes from, and what it is fed; running it is the user's wish."""

    factory: str  # package.module:name or file.py:name
    arguments: Mapping[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None
    input_dtype: str | None = None
    state: tuple[tuple[int, int], ...] = ()  # forward's arguments that are outputs of the last call

    def build(self) -> nn.Module:
        """Return the model as the user's code makes it."""
        return load_factory(self.factory, self.arguments)

    def inputs(self, model: nn.Module) -> tuple[torch.Tensor, ...]:
        """Return random inputs for the model, of the given shape or of one at which it runs."""
        dtype = None if self.input_dtype is None else _torch_dtype(self.input_dtype)
        return deduce_inputs(model, shape=self.input_shape, dtype=dtype)


def plan_code(code: ModelCode, client: Checkpoint, *, seed: int) -> Plan:
    """Return the plan of the user's model at a client's widths, checked by numbers."""
    model = code.build()
    names = model_names(client, model)
    resize_module(model, {names[name]: info.shape for name, info in client.tensors.items()})
    inputs = code.inputs(model)
    rng = np.random.default_rng(seed)
    plan = plan_model(model, inputs, state=code.state)
    verify_plan(model, plan, inputs, rng=rng, state=code.state)
    plan = probe_growth(model, plan, inputs, rng=rng, state=code.state)
    own_names = {model_name: name for name, model_name in names.items()}
    notes = list(plan.notes)
    if code.input_shape is None:
        shapes = ", ".join("×".join(map(str, tensor.shape)) for tensor in inputs)
        notes.append(f"the model was run on random inputs of shape {shapes}")
    if own_names != {name: name for name in own_names} and not _is_prefixed(names, client):
        notes.append("the file's names differ from the model's: paired in order, shapes agree")
    return _renamed(replace(plan, notes=tuple(notes)), own_names)


def model_names(client: Checkpoint, model: nn.Module) -> dict[str, str]:
    """Return the model's name of every tensor of a file: the same, prefixed, or by order."""
    expected = model.state_dict()
    written = {name: client.output_name(name) for name in client.tensors}
    plain = {name: name for name in client.tensors}
    for names in (written, plain):
        if set(names.values()) == set(expected):
            return names
    shapes = [info.shape for info in client.tensors.values()]
    if shapes == [tuple(tensor.shape) for tensor in expected.values()]:
        return dict(zip(client.tensors, expected, strict=True))
    raise ArchitectureError(
        f"{client.name}: {name_difference(plain, expected)}, compared with the model",
        "build the model whose checkpoints were merged",
    )


def _is_prefixed(names: Mapping[str, str], client: Checkpoint) -> bool:
    return all(model_name == client.output_name(name) for name, model_name in names.items())


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan under other tensor names."""
    return replace(
        plan,
        tensors={names[name]: tensor for name, tensor in plan.tensors.items()},
        norms=tuple(_renamed_norm(norm, names) for norm in plan.norms),
    )


def _renamed_norm(norm: Norm, names: Mapping[str, str]) -> Norm:
    fields: dict[str, Any] = {
        key: names[value] if isinstance(value, str) else value for key, value in vars(norm).items()
    }
    return Norm(**fields)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input-dtype is {name!r}, expected a torch dtype, e.g. float32 or long")
    return dtype


def outputs_of(model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all tensors among a model's outputs in evaluation mode."""
    with torch.no_grad():
        return tensors_in(model.eval()(*inputs))


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of nested lists, tuples and dictionaries."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
