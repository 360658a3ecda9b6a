"""What a model calls the tensors of a file: to load them, and for plans under its names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from fedmerge.architecture.from_code.modules import float_tensors
from fedmerge.architecture.from_library import ConfiguredModel
from fedmerge.architecture.widths import resize_module
from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import ArchitectureError
from fedmerge.private_torch import ConvLayer
from fedmerge.user_code import load_state, optional_tensors, parts_of, state_of
from fedmerge.values.clients import name_difference
from fedmerge.values.plans import Norm, Plan

Module = TypeVar("Module", bound=nn.Module)


def model_names(client: Checkpoint, model: nn.Module) -> dict[str, str]:
    """Return the model's name of every tensor of a file: the same, prefixed, or by order.

    By order only if the last parts of the names agree one by one, and the numbers of axes. A file
    may lack what torch does without when it loads it, and further names of tied tensors. A model of
    a library that renames tensors when it loads them tells its names, without those of tensors that
    it does not read.
    """
    if isinstance(model, ConfiguredModel):
        return _names_of_loader(client, model)
    expected, ties = state_of(model), float_tensors(model)[1]
    written = {name: client.output_name(name) for name in client.tensors}
    plain = {name: name for name in client.tensors}
    for needed in _needed_names(model, set(expected)):
        for names in (written, plain):
            given = set(names.values())
            if given <= set(expected) and needed <= _with_tied(given, ties):
                return _by_first_name(names, ties)
        own = [(name.rpartition(".")[2], len(i.shape)) for name, i in client.tensors.items()]
        others = [name for name in expected if name in needed]
        if own == [(name.rpartition(".")[2], expected[name].dim()) for name in others]:
            return dict(zip(client.tensors, others, strict=True))
    raise ArchitectureError(
        f"{client.name}: {name_difference(plain, expected)}, compared with the model",
        "build the model whose checkpoints were merged",
    )


def _names_of_loader(client: Checkpoint, model: ConfiguredModel) -> dict[str, str]:
    own = (name for name in client.tensors if name not in client.aliases)
    written = {client.output_name(name): name for name in own}
    tensors = {name: client.tensors[own] for name, own in written.items()}
    found = model.names_of_file(tensors, client.name)
    return {written[name]: model_name for name, model_name in found.items()}


def _with_tied(names: set[str], ties: Mapping[str, str]) -> set[str]:
    """Return names with all further names of their tensors."""
    firsts = {ties.get(name, name) for name in names}
    return names | firsts | {alias for alias, first in ties.items() if first in firsts}


def _by_first_name(names: dict[str, str], ties: Mapping[str, str]) -> dict[str, str]:
    """Return names such that a tied tensor with one name in the file goes by the model's first."""
    given = set(names.values())
    firsts: dict[str, str] = {}
    for own, name in names.items():
        first = ties.get(name, name)
        is_lacking = first not in given and first not in firsts.values()
        firsts[own] = first if is_lacking else name
    return firsts


def shapes_for(client: Checkpoint, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by the model's names."""
    return {of_model: client.tensors[name].shape for name, of_model in names.items()}


def _needed_names(model: nn.Module, names: set[str]) -> Iterator[set[str]]:
    """Yield the names that a file has as a rule, and those that it must have."""
    yield names
    yield names - optional_tensors(model)


def is_prefixed(names: Mapping[str, str], client: Checkpoint) -> bool:
    """Return whether a model calls tensors as a merge of the client would write them."""
    return all(model_name == client.output_name(name) for name, model_name in names.items())


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan under other tensor names."""
    return replace(
        plan,
        tensors={names[name]: tensor for name, tensor in plan.tensors.items()},
        norms=tuple(_with_names(norm, names) for norm in plan.norms),
    )


def _with_names(norm: Norm, names: Mapping[str, str]) -> Norm:
    fields: dict[str, Any] = {
        key: names[value] if isinstance(value, str) else value for key, value in vars(norm).items()
    }
    return Norm(**fields)


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
