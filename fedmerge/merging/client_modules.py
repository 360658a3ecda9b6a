"""Client checkpoints as modules that run, each built once, and what holds of their layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import ExportedProgram, evaluating, program_inputs
from fedmerge.architecture.from_library import ConfiguredModel
from fedmerge.architecture.model_code import outputs_of
from fedmerge.architecture.tensor_names import model_names
from fedmerge.architecture.widths import resize_module
from fedmerge.checkpoint import to_torch
from fedmerge.errors import ArchitectureError
from fedmerge.matching.features import place_tensor, targets_of
from fedmerge.merging.session import Session
from fedmerge.probes.layer_calls import Call, run_heard
from fedmerge.probes.probe_inputs import Reading, readings
from fedmerge.user_code import (
    copied_object,
    load_state,
    parts_of,
    placed,
    user_code,
)
from fedmerge.values.arrays import Array
from fedmerge.values.clients import Client
from fedmerge.values.plans import Assignment, Norm, index_map


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
            if name in self.names  # others, the model does not read
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
        built = code.template if isinstance(code.template, ConfiguredModel) else code.build()
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


EQUAL = 1e-3  # of the largest value: what the order of sums may change, generously
FACTOR = 2.0  # by which what a batch norm reads is rescaled, to see who else reads it


def steady_weights(modules: ClientModules, inputs: tuple[Tensor, ...]) -> frozenset[str]:
    """Return the weights, by the plan's names, that read the same rows whatever units' order is.

    A layer along another axis, such as a mixer's over tokens, has a row per hidden unit of that
    axis: rows of two clients, or of a client and a merge, are then of different units. The first
    client runs as it is and with the units of every group moved on by one.
    """
    session = modules.session
    client, plan, widths = session.aligned[0], session.plan, session.client_widths[0]
    moves = {g: Assignment(np.roll(np.arange(w), 1), w) for g, w in widths.items()}
    moved = {n: place_tensor(client.read(n), t, moves, widths) for n, t in plan.tensors.items()}
    before, after = (
        _readings(modules, m, inputs) for m in (modules.client(0), modules.merged(moved))
    )
    if [reading.weight for reading in before] != [reading.weight for reading in after]:
        return frozenset()
    unsteady = {
        one.weight
        for one, other in zip(before, after, strict=True)
        if not _is_moved(
            one.values, other.values, index_map(one.layout, targets_of(moves), widths).tolist()
        )
    }
    return frozenset(reading.weight for reading in before) - unsteady


def own_norms(modules: ClientModules, inputs: tuple[Tensor, ...]) -> tuple[Norm, ...]:
    """Return the plan's batch norms that alone read what they normalise.

    It may be rescaled then, with the norm's statistics, and no output changes; where a residual
    stream or later layers read it too, outputs do.
    """
    session = modules.session
    client, plan = session.aligned[0], session.plan
    given = tuple(tensor.to(modules.device) for tensor in inputs)
    arrays = {name: client.read(name) for name in plan.tensors}
    before = outputs_of(modules.merged(arrays), given)

    def are_own(norms: Sequence[Norm]) -> bool:
        rescaled = {k: v for norm in norms for k, v in _rescaled(norm, arrays).items()}
        after = outputs_of(modules.merged({**arrays, **rescaled}), given)
        return all(map(_is_equal, before, after))

    return plan.norms if are_own(plan.norms) else tuple(n for n in plan.norms if are_own([n]))


def _rescaled(norm: Norm, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the producer of a norm times a factor, and statistics that take it back."""
    names = (norm.producer, norm.bias, norm.mean)
    found = {name: FACTOR * arrays[name] for name in names if name is not None}
    return {**found, norm.variance: FACTOR**2 * (arrays[norm.variance] + norm.eps) - norm.eps}


def _readings(
    modules: ClientModules, model: nn.Module, inputs: tuple[Tensor, ...]
) -> list[Reading]:
    calls: list[Call] = []
    run_heard(model, [given.to(modules.device) for given in inputs], calls.append)
    plan, names = modules.session.plan, modules.own_names
    return [reading for call in calls for reading in readings(call, plan, names)]


def _is_moved(before: Tensor, after: Tensor, places: list[int]) -> bool:
    """Return whether rows are as before, but for the places of their columns."""
    if before.shape != after.shape:
        return False
    return _is_equal(before, after[:, places])


def _is_equal(before: Tensor, after: Tensor) -> bool:
    tolerance = EQUAL * float(before.abs().max()) if before.numel() else 0.0
    return torch.allclose(before, after, rtol=0, atol=tolerance, equal_nan=True)
