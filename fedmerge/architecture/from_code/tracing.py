"""Follow a model's run operation by operation, and label its axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedmerge.architecture.from_code.branch_search import Way, Ways, ways_of
from fedmerge.architecture.from_code.branches import is_numbered, run_forward
from fedmerge.architecture.from_code.dispatch import EagerMode, eagerly, plain_kernels
from fedmerge.architecture.from_code.labels import Axes, Fixed, Label, Parts, labels_of
from fedmerge.architecture.from_code.modules import (
    StatePairs,
    float_tensors,
    looking_copy,
    tensor_leaves,
)
from fedmerge.architecture.from_code.rules import RULES, is_pointwise, pointwise
from fedmerge.architecture.from_code.trace import (
    Call,
    Rule,
    Site,
    Stacked,
    Trace,
    Value,
    tensors_in,
)
from fedmerge.errors import ArchitectureError, ModelCodeError, UserCodeError
from fedmerge.private_torch import leaves, map_tensors, schema_of, uncompiled, without_onednn
from fedmerge.tracebacks import last_line
from fedmerge.user_code import named, own_code
from fedmerge.values.plans import OUTPUT

_STACK = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_WHOLE: Mapping[str, tuple[str, ...]] = {  # functions handled as one op, and their arguments
    **dict.fromkeys(_RECURRENT, ("input", *_STACK, "batch_first")),
    **dict.fromkeys((f"{kind}_cell" for kind in _RECURRENT), _CELL),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "scaled_dot_product_attention": (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ),
}  # fmt: skip
_LEAVING = frozenset({"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "__reduce_ex__"})


class _Ops(EagerMode):  # type: ignore[no-untyped-call]
    """Apply the rule of every ATen op."""

    walks_all = True

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.is_paused = False

    def look_before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return an op's arguments by name."""
        if self.is_paused:
            return None
        arguments = _by_name(schema_of(func).arguments, args, kwargs)
        return self._before(arguments) if torch.Tag.inplace_view in func.tags else arguments

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Record what an op's rule says."""
        if before is None:
            return result
        _check_shaped(result)
        space, _, name = schema_of(func).name.partition("::")
        name = name if space == "aten" else schema_of(func).name
        written = [
            before[a.name]
            for a in schema_of(func).arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in before
        ]
        if torch.Tag.inplace_view in func.tags:
            written = []
        self.trace.steps += 1
        call = Call(name, before, tuple(tensors_in(result)), self.trace)
        units = _labels(call) if is_numbered() else ()
        _apply(call, _rule_of(func, name), tensors_in(written))
        for label in units:
            if isinstance(self.trace.labels.resolve(label), Parts):
                self.trace.labels.pin(label, "cut where the data say")
        return result

    def join(self, one: Any, other: Any) -> None:
        """Unify the labels of two values of which either may come out of a higher-order op."""
        ones, others = leaves(one), leaves(other)
        if list(map(_shape_of, ones)) != list(map(_shape_of, others)):
            raise ArchitectureError(
                "a loop or branch of the model gives other shapes than it takes, or than the other "
                "branch gives"
            )
        for tensor, twin in zip(ones, others, strict=True):
            if not isinstance(tensor, Tensor) or not isinstance(twin, Tensor):
                continue
            self.trace.look(tensor).makers = None
            for axis, tree in zip(self.trace.read(tensor), self.trace.read(twin), strict=True):
                self.trace.labels.unify(axis, tree)

    def _before(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with an alias of the tensor whose shape is about to change."""
        name, tensor = next(iter(arguments.items()))
        alias = tensor.detach()
        self.trace.put(alias, self.trace.look(tensor))
        return {**arguments, name: alias}


def _labels(call: Call) -> list[Label]:
    """Return the labels of all that a call reads."""
    axes = (axis for tensor in call.tensors() for axis in call.trace.look(tensor).axes)
    return [label for axis in axes for label in labels_of(call.labels.resolve(axis))]


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


class _Functions(TorchFunctionMode):
    """Handle composite functions as one op, and see data leave for Python."""

    def __init__(self, ops: _Ops) -> None:
        super().__init__()
        self.ops = ops

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, with its parts unseen if it has a rule of its own."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LEAVING:
            with own_code():
                self._leave(name, args)
        elif name in _WHOLE and not self.ops.is_paused:
            return self._whole(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _leave(self, name: str, args: Sequence[Any]) -> None:
        for tensor in tensors_in(list(args[:1])):
            for axis in self.ops.trace.read(tensor):
                self.ops.trace.labels.pin(axis, f"{name}: leaves the model")

    def _whole(self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        self.ops.is_paused = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.ops.is_paused = False
        with own_code():
            names = _WHOLE[name]
            if name in _RECURRENT and not isinstance(args[3], bool):
                names = ("input", "batch_sizes", *_STACK)
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            self.ops.trace.steps += 1
            call = Call(name, arguments, tuple(tensors_in(result)), self.ops.trace)
            _apply(call, RULES[name], ())
        return result


@contextmanager
def watching(trace: Trace) -> Iterator[None]:
    """Record every op in a trace, with the fast paths off that hide what they do.

    One thread: the inputs are small, and threads that wait for a busy core cost more than they do.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ops = _Ops(trace)
    try:
        with without_onednn(), plain_kernels(), eagerly(), torch.no_grad(), ops, _Functions(ops):
            yield
    finally:
        torch.set_num_threads(threads)


def _check_shaped(result: Any) -> None:
    """Refuse results without a shape, of which no axis can be followed."""
    if any(tensor.is_nested for tensor in tensors_in(result)):
        raise ArchitectureError(
            "the model computes with nested tensors, whose axes can't be followed",
            "describe its axes in a plan of your own (`plan`)",
        )


def _by_name(
    schema: Iterable[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an op's arguments by name, defaults included."""
    named: dict[str, Any] = {}
    for position, argument in enumerate(schema):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named


def _rule_of(func: Any, name: str) -> Rule | None:
    rule = RULES.get(name) or RULES.get(name.rstrip("_"))
    return rule or (pointwise if is_pointwise(func) else None)


def _apply(call: Call, rule: Rule | None, written: Sequence[Tensor]) -> None:
    """Record what a rule says of an op's results; without one all that it touches is pinned."""
    call.labels.cause = call.name
    found = _results(call, rule)
    for k, tensor in enumerate(written):
        value = found[min(k, len(found) - 1)] if found else ()
        call.trace.write(tensor, value.axes if isinstance(value, Value) else value)
    call.trace.consume(call.tensors(), call.outputs)
    kept = {id(tensor) for tensor in written}
    for tensor, value in zip(call.outputs, found, strict=False):
        if id(tensor) not in kept:
            call.trace.put(tensor, value if isinstance(value, Value) else Value(value))


def _results(call: Call, rule: Rule | None) -> list[Axes | Value]:
    """Return what a rule says of every result.

    A rule that fails, or labels another shape than the op gave (an overload that it does not
    know), is no rule: what it has tied so far only restricts more.
    """
    try:
        result = rule(call) if rule is not None else _unknown(call)
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return _unknown(call)
    found = result if isinstance(result, list) else [() if result is None else result]
    for value, tensor in zip(found, call.outputs, strict=False):
        axes = value.axes if isinstance(value, Value) else value
        if tuple(axis.size for axis in axes) != tuple(tensor.shape):
            return _unknown(call)
    return found if len(found) >= len(call.outputs) else _unknown(call)


def _unknown(call: Call) -> list[Axes | Value]:
    """Pin everything that an op without a rule reads."""
    axes = [axis for tensor in call.tensors() for axis in call.trace.read(tensor)]
    if any(labels_of(call.labels.resolve(axis)) for axis in axes):
        call.trace.unknown.setdefault(call.name)
    return list(_pinned(call))


def _pinned(call: Call) -> list[Axes]:
    """Pin everything that an op reads; return pinned results."""
    reason = f"{call.name} has no rule"
    for tensor in call.tensors():
        for axis in call.trace.read(tensor):
            call.labels.pin(axis, reason)
    return [tuple(Fixed(size, reason) for size in tensor.shape) for tensor in call.outputs]


_HINT = "give its inputs: `input_shape`, and `input_dtype=long` where they are tokens"


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
    module = looking_copy(model)
    own, aliases = float_tensors(module)
    trace, *others = [_followed(module, own, way, state) for way in ways.all]
    for way, alone in zip(ways.all[1:], others, strict=True):
        _run(module, way, state, trace, alone.sites)
    tensors = {name: trace.look(tensor).axes for name, tensor in trace.owners.values()}
    _pin_unused(trace, tensors)
    unused = tuple(name for name in tensors if name not in trace.reads)
    if unused and ways.unseen[0]:
        raise ArchitectureError(
            f"the model decides by its data ({ways.unseen[0]}), and no way that was found uses "
            f"'{unused[0]}'",
            "what reads it is unknown: take the branch out, or plan by hand (`plan`)",
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
    inputs = map_tensors(torch.clone, inputs)
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
        "describe its axes in a plan of your own (`plan`)",
        details=error.details,
    )


def _finish(trace: Trace, inputs: tuple[Any, ...], outputs: Any, state: StatePairs) -> None:
    """Pin the outputs, except states that go back in: they carry the inputs' units."""
    listed = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    going_back: set[int] = set()
    for i, j in state:
        if i >= len(inputs) or j >= len(listed):
            raise ArchitectureError(
                f"`state={i}:{j}`: the model takes {len(inputs)} inputs and gives {len(listed)}",
                "pairs are argument:output, both counted from 0",
            )
        pairs = zip(tensor_leaves(inputs[i]), tensor_leaves(listed[j]), strict=False)
        for given, made in pairs:
            if given.shape != made.shape:
                raise ArchitectureError(
                    f"`state={i}:{j}`: input {tuple(given.shape)}, output {tuple(made.shape)}",
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
