"""Run a model once and follow its units through every op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedmerge.errors import ArchitectureError, ModelCodeError, UserCodeError
from fedmerge.graph.model.departures import run_forward
from fedmerge.graph.model.modes import watching
from fedmerge.graph.model.modules import StatePairs, copied, float_tensors, tensor_leaves
from fedmerge.graph.model.trace import Site, Stacked, Trace, Value
from fedmerge.graph.model.trees import Axes, Fixed, labels_of
from fedmerge.graph.model.ways import Way, Ways, ways_of
from fedmerge.tracebacks import last_line
from fedmerge.types.plans import OUTPUT
from fedmerge.user_code import named

_HINT = "give its inputs: --input-shape, and --input-dtype long where they are tokens"


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


def walk_model(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    state: StatePairs = (),
    ways: Ways | None = None,
) -> Walked:
    """Return what runs of the model show of its tensors' axes: one on every way through it.

    The model runs in evaluation mode on a copy. A second run follows where the first showed that
    slices of one tensor (stacked queries, keys, values) go different ways. The ways are those
    that the inputs show, unless they are known.
    """
    ways = ways or ways_of(model, inputs, state=state)
    module = copied(model)
    own, aliases = float_tensors(module)
    trace, *others = [_followed(module, own, way, state) for way in ways.all]
    for way, alone in zip(ways.all[1:], others, strict=True):
        _run(module, way, state, trace, alone.sites)
    tensors = {name: trace.look(tensor).axes for name, tensor in trace.owners.values()}
    _pin_unused(trace, tensors)
    unused = tuple(name for name in tensors if name not in trace.reads)
    if unused and ways.opaque:
        raise ArchitectureError(
            f"the model decides by its data ({ways.opaque}), and no way that was found uses "
            f"'{unused[0]}'",
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


def _followed(
    module: nn.Module, tensors: Mapping[str, Tensor], way: Way, state: StatePairs
) -> Trace:
    """Return what runs on one way show, the last with all sites that those before it found."""
    sites: frozenset[Site] = frozenset()
    while True:
        trace = Trace()
        for name, tensor in tensors.items():
            trace.own(name, tensor)
        _run(module, way, state, trace, sites)
        if trace.selected <= sites:
            return trace
        sites |= trace.selected


def _run(
    module: nn.Module, way: Way, state: StatePairs, trace: Trace, sites: frozenset[Site]
) -> None:
    """Follow one run on a way, beside those that a trace knows already."""
    with trace.another_run(sites), way.taken():
        _run_once(module, way.inputs, state, trace)


def _run_once(module: nn.Module, inputs: tuple[Any, ...], state: StatePairs, trace: Trace) -> None:
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
            outputs = run_forward(module, inputs, hint=_HINT).outputs
    except UserCodeError as error:
        raise _not_followed(module, error) from error
    _finish(trace, inputs, outputs, state)


def _not_followed(module: nn.Module, error: UserCodeError) -> UserCodeError:
    """Return a failed run as what it is, where it is torch that can't run under our eyes."""
    reason = error.__cause__
    if not isinstance(reason, NotImplementedError):
        return error
    return ModelCodeError(
        f"the model does something that can't be followed: {last_line(reason)}{named(module)}",
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
