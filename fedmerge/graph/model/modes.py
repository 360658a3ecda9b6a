"""Watch a model run: every ATen op by a dispatch mode, composite ones whole by a function mode.

PyTorch takes `lstm`, `gru` and attention apart before a dispatch mode sees them, and data leaves
for numpy without any op, so those few are caught as Python calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedmerge.errors import ArchitectureError
from fedmerge.graph.model.call import Call, Rule, tensors_in
from fedmerge.graph.model.dispatch import EagerMode, eagerly, plain_kernels, uncompiled
from fedmerge.graph.model.rules import RULES, is_pointwise, pointwise
from fedmerge.graph.model.trace import Trace, Value
from fedmerge.graph.model.trees import Axes, Fixed, labels_of
from fedmerge.user_code import own_code

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
        arguments = _by_name(func._schema.arguments, args, kwargs)
        return self._before(arguments) if torch.Tag.inplace_view in func.tags else arguments

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Record what an op's rule says."""
        if before is None:
            return result
        _check_shaped(result)
        space, _, name = func._schema.name.partition("::")
        name = name if space == "aten" else func._schema.name
        written = [
            before[a.name]
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in before
        ]
        if torch.Tag.inplace_view in func.tags:
            written = []
        self.trace.steps += 1
        call = Call(name, before, tuple(tensors_in(result)), self.trace)
        _apply(call, _rule_of(func, name), tensors_in(written))
        return result

    def join(self, one: Any, other: Any) -> None:
        """Unify the labels of two values of which either may come out of a higher-order op."""
        for tensor, twin in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
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
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.set_num_threads(1)
    ops = _Ops(trace)
    try:
        with plain_kernels(), eagerly(), torch.no_grad(), ops, _Functions(ops):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch.set_num_threads(threads)


def _check_shaped(result: Any) -> None:
    """Refuse results without a shape, of which no axis can be followed."""
    if any(tensor.is_nested for tensor in tensors_in(result)):
        raise ArchitectureError(
            "the model computes with nested tensors, whose axes can't be followed",
            "describe its axes in a plan of your own (--plan)",
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
