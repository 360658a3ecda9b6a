"""Run a model once and follow its units through every op."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedmerge.errors import ArchitectureError, ModelCodeError, UserCodeError
from fedmerge.graph.model.modes import watching
from fedmerge.graph.model.trace import Stacked, Trace, Value
from fedmerge.graph.model.trees import Axes, Fixed, labels_of
from fedmerge.tracebacks import last_line
from fedmerge.types.plans import OUTPUT
from fedmerge.user_code import own_code, run_model, state_of, user_code

_HINT = "give its inputs: --input-shape, and --input-dtype long where they are tokens"

StatePairs = Sequence[tuple[int, int]]  # forward's argument i is output j of the step before


@dataclass(frozen=True)
class Walked:
    """What one run showed: every tensor of the state dict with its labels, resolved."""

    module: nn.Module  # the copy that ran
    trace: Trace
    tensors: dict[str, Axes]  # one name per tied tensor
    aliases: dict[str, str]  # other names of tied tensors
    unused: tuple[str, ...]

    @cached_property
    def layers(self) -> dict[str, nn.Module]:
        """The module's parts by name (scripted ones cannot be asked)."""
        return dict(self.module.named_modules(remove_duplicate=False))


def walk_model(model: nn.Module, inputs: tuple[Any, ...], *, state: StatePairs = ()) -> Walked:
    """Return what a run of the model on the inputs shows of its tensors' axes.

    The model runs in evaluation mode on a copy. A second run follows where the first showed that
    slices of one tensor (stacked queries, keys, values) go different ways.
    """
    module = copied(model)
    sites: frozenset[tuple[int, int]] = frozenset()
    while True:
        trace, aliases = _run(module, inputs, state, sites)
        found = sites | trace.selected
        if found == sites:
            break
        sites = found
    tensors = {name: trace.look(tensor).axes for name, tensor in trace.owners.values()}
    _pin_unused(trace, tensors)
    unused = tuple(name for name in tensors if name not in trace.reads)
    if unused and trace.is_branching:
        raise ArchitectureError(
            f"the model decides by its data, and these inputs do not use '{unused[0]}'",
            "what reads it is unknown: take the branch out, or plan by hand (--plan)",
        )
    return Walked(module, trace, tensors, aliases, unused)


def _pin_unused(trace: Trace, tensors: dict[str, Axes]) -> None:
    """Pin what no computation read: whole tensors, or rows beyond the length of these inputs."""
    resolve = trace.labels.resolve
    used = {label for axes in trace.consumed for axis in axes for label in labels_of(resolve(axis))}
    for axes in tensors.values():
        for axis in axes:
            for label in labels_of(resolve(axis)):
                if label not in used:
                    trace.labels.pin(label, "unused")


def evaluating(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode; an exported program is in the mode it was made in."""
    with user_code("the model can't be put into evaluation mode", of=model):
        try:
            return model.eval()
        except NotImplementedError:
            return model


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU, in evaluation mode."""
    hint = "build it without tensors that carry a graph, and on the CPU"
    with user_code("the model cannot be copied", of=model, hint=hint):
        computed = _computed_tensors(list(model.modules()))
        with torch.no_grad(), warnings.catch_warnings():  # scripted parameters carry no graph then
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, for exported programs
            return evaluating(copy.deepcopy(model, computed).to("cpu"))


def _computed_tensors(parts: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return copies of tensors that hooks leave on modules (pruned weights), which have a graph."""
    with own_code():
        attributes = [value for part in parts for value in vars(part).values()]
        computed = [v for v in attributes if isinstance(v, Tensor) and not v.is_leaf]
        return {id(tensor): tensor.detach().clone() for tensor in computed}


def float_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the float tensors of a state dict by their first name, and the other names."""
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_of(module, keep_vars=True).items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        key = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor
    return tensors, aliases


def _run(
    module: nn.Module, inputs: tuple[Any, ...], state: StatePairs, sites: frozenset[tuple[int, int]]
) -> tuple[Trace, dict[str, str]]:
    trace = Trace(sites=sites)
    tensors, aliases = float_tensors(module)
    for name, tensor in tensors.items():
        trace.own(name, tensor)
    inputs = pytree.tree_map_only(Tensor, torch.clone, inputs)
    carried = {i for i, _ in state}
    for position, argument in enumerate(inputs):
        for tensor in tensor_leaves(argument):
            if position in carried:
                trace.put(tensor, _carried(trace, tensor))
            else:
                trace.pin_new(tensor, "input")
    try:
        with watching(trace):
            outputs = run_model(module, inputs, hint=_HINT)
    except UserCodeError as error:
        raise _not_followed(error) from error
    _finish(trace, inputs, outputs, state)
    return trace, aliases


def _not_followed(error: UserCodeError) -> UserCodeError:
    """Return a failed run as what it is, where it is torch that can't run under our eyes."""
    reason = error.__cause__
    if not isinstance(reason, NotImplementedError):
        return error
    return ModelCodeError(
        f"the model does something that can't be followed: {last_line(reason)}",
        "describe its axes in a plan of your own (--plan)",
        details=error.details,
    )


def _finish(trace: Trace, inputs: tuple[Any, ...], outputs: Any, state: StatePairs) -> None:
    """Pin the outputs, except states that go back in: they carry the inputs' units."""
    listed = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    going_back: set[int] = set()
    for i, j in state:
        if i >= len(inputs) or j >= len(listed):
            raise ArchitectureError(
                f"--state {i}:{j}: the model takes {len(inputs)} inputs and gives {len(listed)}",
                "pairs are argument:output, both counted from 0",
            )
        pairs = zip(tensor_leaves(inputs[i]), tensor_leaves(listed[j]), strict=False)
        for given, made in pairs:
            if given.shape != made.shape:
                raise ArchitectureError(
                    f"--state {i}:{j}: input {tuple(given.shape)}, output {tuple(made.shape)}",
                    "a state must keep its shape from one step to the next",
                )
            _tie_state(trace, given, made)
        going_back.add(j)
    found = 0
    for j, output in enumerate(listed):
        for tensor in tensor_leaves(output):
            found += 1
            if j not in going_back:
                for axis in trace.read(tensor):
                    trace.labels.pin(axis, OUTPUT)
    if not found:
        raise ArchitectureError(
            f"the model returns no tensor but {type(outputs).__name__}",
            "its forward must return a tensor, or a tuple, list or dict of tensors",
        )


def _carried(trace: Trace, tensor: Tensor) -> Value:
    """Return new labels of a carried state, for every layer of a recurrent stack its own."""
    axes = tuple(map(trace.labels.fresh, tensor.shape))
    if tensor.dim() != 3 or tensor.shape[0] == 1:
        return Value(axes)
    slices = [tuple(map(trace.labels.fresh, tensor.shape[1:])) for _ in range(tensor.shape[0])]
    return Value((Fixed(tensor.shape[0], "layers"), *axes[1:]), Stacked(0, tuple(slices)))


def _tie_state(trace: Trace, given: Tensor, made: Tensor) -> None:
    """Give a state that goes back in the units that it came with, layer by layer if possible."""
    one, other = trace.look(given).stacked, trace.look(made).stacked
    if one is not None and other is not None and one.dim == other.dim:
        pairs = list(zip(one.slices, other.slices, strict=True))
    else:
        pairs = [(trace.read(given), trace.read(made))]
    for own_axes, back_axes in pairs:
        for own, back in zip(own_axes, back_axes, strict=True):
            trace.labels.unify(own, back)


def tensor_leaves(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and plain objects."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += [t for item in vars(leaf).values() for t in tensor_leaves(item)]
    return found
