"""Clients and merges as modules that run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedmerge.checkpoint import to_torch
from fedmerge.graph.model import ExportedProgram, evaluating
from fedmerge.graph.resize import resize_module
from fedmerge.types.arrays import Array
from fedmerge.types.clients import Client
from fedmerge.user_code import load_state, parts_of, placed, user_code
from fedmerge.workflow.models import ModelCode, model_names
from fedmerge.workflow.prepared import Prepared


@dataclass(frozen=True)
class Models:
    """Builds the modules of prepared clients, and of merges of them, on one device."""

    prepared: Prepared
    code: ModelCode | None  # None: a graph
    device: str
    graph: Any = None  # an exported program; None: that of the first client's file

    @cached_property
    def names(self) -> dict[str, str]:
        """The model's name of every tensor, by the first client's."""
        return model_names(self.prepared.clients[0], self._build())

    @cached_property
    def own_names(self) -> dict[str, str]:
        """The first client's name of every tensor, by the model's; of tied ones the planned."""
        aliases = self.prepared.aligned[0].aliases
        return {model: aliases.get(name, name) for name, model in self.names.items()}

    def client(self, number: int) -> nn.Module:
        """Return one client's model."""
        client, first = self.prepared.aligned[number], self.prepared.aligned[0]
        source = {n: client if n in client.tensors else first for n in first.tensors}
        return self._module(lambda name: _read(source[name], name))

    def merged(self, arrays: Mapping[str, Array]) -> nn.Module:
        """Return the model of global tensors, given by the plan's names; others are the first's."""
        first = self.prepared.aligned[0]

        def read(name: str) -> Array:
            name = first.aliases.get(name, name)
            return arrays[name] if name in arrays else first.read(name)

        return self._module(read)

    def _module(self, read: Callable[[str], Array]) -> nn.Module:
        module = self._build()
        first = self.prepared.aligned[0]
        state = {
            self.names[name]: self._runnable(to_torch(read(name), info.dtype))
            for name, info in first.tensors.items()
        }
        resize_module(module, {name: tuple(tensor.shape) for name, tensor in state.items()})
        load_state(module, state)
        return evaluating(placed(module, self.device, self._precision))

    @cached_property
    def _precision(self) -> torch.dtype:
        """Double if the clients are, else single: half precision is for storage here."""
        infos = self.prepared.aligned[0].tensors.values()
        is_double = any(info.dtype == "float64" for info in infos)
        return torch.float64 if is_double else torch.float32

    def _runnable(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._precision) if tensor.is_floating_point() else tensor

    def _build(self) -> nn.Module:
        if self.code is None:
            return copy.deepcopy(ExportedProgram(self.program))  # its tensors are the file's
        built = self.code.build()
        if not _share_modules(built, self._template):
            return built
        with user_code("the model cannot be copied", of=built):
            return copy.deepcopy(built)

    @cached_property
    def _template(self) -> nn.Module:
        """A module of the user's code: what another call returns of it is nobody's own."""
        assert self.code is not None
        return self.code.build()

    @property
    def program(self) -> Any:
        """The exported program that runs the clients, where there is no code."""
        program = self.graph or self.prepared.clients[0].program
        assert program is not None
        return program


def _share_modules(one: nn.Module, other: nn.Module) -> bool:
    own, others = ({id(part) for _, part in parts_of(model)} for model in (one, other))
    return not own.isdisjoint(others)


def _read(client: Client, name: str) -> Array:
    return client.read(client.aliases.get(name, name))
