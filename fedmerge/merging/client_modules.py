"""Client checkpoints as modules that run, each built once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import ExportedProgram, evaluating, program_inputs
from fedmerge.architecture.model_code import model_names
from fedmerge.architecture.widths import resize_module
from fedmerge.checkpoint import to_torch
from fedmerge.errors import ArchitectureError
from fedmerge.merging.session import Session
from fedmerge.user_code import (
    copied_object,
    load_state,
    parts_of,
    placed,
    user_code,
)
from fedmerge.values.arrays import Array
from fedmerge.values.clients import Client


@dataclass(frozen=True)
class ClientModules:
    """The modules of a session's clients, and one that holds a merge of them after the other."""

    session: Session
    graph: Any = None  # an exported program; None: that of the first client's file
    built: dict[str, nn.Module] = field(default_factory=dict)  # by client's name

    @property
    def device(self) -> str:
        """Where the modules are."""
        return self.session.device

    @cached_property
    def names(self) -> dict[str, str]:
        """The model's name of every tensor, by the first client's."""
        return model_names(self.session.clients[0], self._template)

    @cached_property
    def own_names(self) -> dict[str, str]:
        """The first client's name of every tensor, by the model's; of tied ones the planned."""
        aliases = self.session.aligned[0].aliases
        return {model: aliases.get(name, name) for name, model in self.names.items()}

    def client(self, number: int) -> nn.Module:
        """Return one client's model."""
        client, first = self.session.aligned[number], self.session.aligned[0]
        if client.name not in self.built:
            source = {n: client if n in client.tensors else first for n in first.tensors}
            state = self._state(lambda name: _read(source[name], name))
            self.built[client.name] = self._loaded(self._fresh(), state)
        return self.built[client.name]

    @property
    def clients(self) -> list[nn.Module]:
        """All clients' models."""
        return [self.client(number) for number in range(len(self.session.aligned))]

    def merged(self, arrays: Mapping[str, Array]) -> nn.Module:
        """Return the model of global tensors, given by the plan's names; others are the first's.

        It is the same module every time, so whoever asks for another merge is done with the last.
        """
        return self._loaded(self._merged, self._merged_state(arrays))

    def trainable(self, arrays: Mapping[str, Array]) -> nn.Module:
        """Return such a model that is the caller's own."""
        return self._loaded(self._fresh(), self._merged_state(arrays))

    def change(self, state: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> None:
        """Give some tensors of a module's state other values in place, by the plan's names."""
        infos = self.session.aligned[0].tensors
        for model_name, name in self.own_names.items():
            if name in arrays:
                values = self._runnable(to_torch(arrays[name], infos[name].dtype))
                with torch.no_grad():
                    state[model_name].copy_(values)

    def of(self, session: Session) -> ClientModules:
        """Return the modules of a session of some of the clients; none of them is built again."""
        graph = None if session.model is not None else self.program
        return replace(self, session=session, graph=graph)

    def sample_inputs(self) -> tuple[Tensor, ...]:
        """Return inputs of a few samples on which the first client runs."""
        model, code = self.client(0), self.session.model
        inputs: Sequence[Any] = ()
        if code is not None:
            inputs = code.inputs(model)
        elif isinstance(model, ExportedProgram):
            inputs = program_inputs(model)
        if not all(isinstance(value, Tensor) for value in inputs):
            raise ArchitectureError("the model takes states, of which no probes are made")
        return tuple(inputs)

    @property
    def program(self) -> Any:
        """The exported program that runs the clients, where there is no code."""
        program = self.graph or self.session.clients[0].program
        assert program is not None
        return program

    def _merged_state(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        first = self.session.aligned[0]

        def read(name: str) -> Array:
            name = first.aliases.get(name, name)
            return arrays[name] if name in arrays else first.read(name)

        return self._state(read)

    def _state(self, read: Callable[[str], Array]) -> dict[str, Tensor]:
        return {
            self.names[name]: self._runnable(to_torch(read(name), info.dtype))
            for name, info in self.session.aligned[0].tensors.items()
        }

    def _loaded(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        resize_module(module, {name: tuple(tensor.shape) for name, tensor in state.items()})
        ready = placed(module, self.device, self._precision)  # before, so that nothing is rounded
        load_state(ready, dict(state))
        return evaluating(ready)

    @cached_property
    def _precision(self) -> torch.dtype:
        """Double if the clients are, else single: half precision is for storage here."""
        infos = self.session.aligned[0].tensors.values()
        is_double = any(info.dtype == "float64" for info in infos)
        return torch.float64 if is_double else torch.float32

    def _runnable(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._precision) if tensor.is_floating_point() else tensor

    @cached_property
    def _merged(self) -> nn.Module:
        return self._fresh()

    @property
    def _template(self) -> nn.Module:
        """A module whose tensors' names and whose parts are looked at, and nothing else."""
        code = self.session.model
        return self._fresh() if code is None else code.template

    def _fresh(self) -> nn.Module:
        """Return a module of our own: what the user's code returns again is copied."""
        code = self.session.model
        if code is None:
            return copy.deepcopy(ExportedProgram(self.program))  # its tensors are the file's
        built = code.build()
        if not _share_modules(built, code.template):
            return built
        with user_code("the model cannot be copied", of=built):
            own: nn.Module = copied_object(built, {})
            return own


def _share_modules(one: nn.Module, other: nn.Module) -> bool:
    own, others = ({id(part) for _, part in parts_of(model)} for model in (one, other))
    return not own.isdisjoint(others)


def _read(client: Client, name: str) -> Array:
    return client.read(client.aliases.get(name, name))
