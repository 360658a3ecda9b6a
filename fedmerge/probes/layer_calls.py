"""Layers as they are called in a run: inputs, outputs, windows and recurrent cells."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedmerge.architecture.from_code.dispatch import EagerMode, eagerly
from fedmerge.architecture.from_code.modules import float_tensors
from fedmerge.errors import UserCodeError
from fedmerge.private_torch import leaves, schema_of, storage_address, uncompiled
from fedmerge.user_code import StopRun, own_code, run_model


@dataclass(frozen=True)
class Window:
    """How a convolution's kernel moves, one number per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


def patches(image: Tensor, window: Window, rows: Tensor) -> Tensor:
    """Return (rows, channels × kernel positions) of an image (samples, channels, …).

    `rows` are places of outputs, samples first; columns are in the order of a flattened kernel.
    """
    sides = [(pad, pad) for pad in reversed(window.padding)]
    padded = functional.pad(image.movedim(1, -1), [0, 0, *itertools.chain(*sides)])
    spatial = padded.shape[1:-1]
    sizes = [
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, dilation in zip(
            spatial, window.kernel, window.stride, window.dilation, strict=True
        )
    ]
    sample, *places = torch.unravel_index(rows.to(image.device), (len(image), *sizes))
    first = sample  # the place of a patch's first pixel among all pixels
    for row, stride, size in zip(places, window.stride, spatial, strict=True):
        first = first * size + row * stride
    pixels = padded.reshape(-1, padded.shape[-1])
    parts = []
    for offset in itertools.product(*map(range, window.kernel)):
        step = 0
        for place, dilation, size in zip(offset, window.dilation, spatial, strict=True):
            step = step * size + place * dilation
        parts.append(pixels[first + step])
    return torch.stack(parts, dim=2).flatten(1)


Kind: TypeAlias = str  # lstm, gru, rnn_tanh or rnn_relu
NameOf: TypeAlias = Callable[[Tensor | None], str | None]
GATES: Mapping[Kind, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class CellCall:
    """One layer and direction of a recurrent stack in a run, time first, in its own order.

    `inputs` (steps, samples, in), `states` (steps + 1, samples, hidden) with the initial one,
    which alone is known before the cell runs.
    """

    kind: Kind
    weight_ih: str
    weight_hh: str
    bias_ih: str | None
    bias_hh: str | None
    inputs: Tensor
    states: Tensor
    parameters: tuple[Tensor, ...]  # weight_ih (gates × hidden, in), weight_hh, the biases if any

    @property
    def has_bias(self) -> bool:
        """Whether parameters are added to the gates."""
        return self.bias_ih is not None

    @property
    def reads(self) -> int:
        """How many numbers one gate is a sum over."""
        return self.inputs.shape[-1] + self.states.shape[-1]

    def input_rows(self, rows: Tensor) -> Tensor:
        """Return the inputs (rows, in) of some steps × samples."""
        return self.inputs.flatten(0, 1)[rows]

    def state_rows(self, rows: Tensor) -> Tensor:
        """Return the states before (rows, hidden) some steps × samples."""
        return self.states[:-1].flatten(0, 1)[rows]

    def added(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what inputs and states add to the gates (rows, gates × hidden), with biases."""
        inputs, states = self.input_rows(rows), self.state_rows(rows)
        weight_ih, weight_hh, *biases = self.parameters
        bias_ih, bias_hh = biases or (0.0, 0.0)
        return inputs @ weight_ih.T + bias_ih, states @ weight_hh.T + bias_hh


def run_stack(
    name: str,
    args: Sequence[Any],
    name_of: NameOf,
    tell: Callable[[CellCall], object],
    *,
    is_ahead: bool,
) -> tuple[Tensor, ...] | None:
    """Run `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` layer by layer, if it is such a call.

    Every cell's call is told before the next one runs; if `is_ahead`, before the cell itself does.
    None for other functions, packed sequences, projections and weights that are no parameters.
    """
    if name not in GATES or len(args) < 9 or not isinstance(args[3], bool):
        return None
    inputs, hx, params, has_biases, layers, _, _, is_both_ways, is_batch_first = args[:9]
    states = list(hx) if isinstance(hx, tuple | list) else [hx]
    directions = 1 + bool(is_both_ways)
    per_cell = 2 + 2 * bool(has_biases)
    if len(params) != layers * directions * per_cell or any(name_of(p) is None for p in params):
        return None
    function = getattr(torch, name)
    values = inputs.transpose(0, 1) if is_batch_first and inputs.dim() == 3 else inputs
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            own = params[k * per_cell : (k + 1) * per_cell]
            steps = values.flip(0) if k % directions else values
            first = [state[k : k + 1] for state in states]
            given = tuple(first) if name == "lstm" else first[0]
            settings = (has_biases, 1, 0.0, False, False, False)
            if is_ahead:
                tell(_call(name, own, name_of, steps, first[0]))
            made, *last = function(steps, given, own, *settings)
            if not is_ahead:
                tell(_call(name, own, name_of, steps, torch.cat([first[0], made])))
            finals.append(tuple(last))
            outputs.append(made.flip(0) if k % directions else made)
        values = torch.cat(outputs, dim=-1)
    last_states = [torch.cat(parts) for parts in zip(*finals, strict=True)]
    result = values.transpose(0, 1) if is_batch_first and inputs.dim() == 3 else values
    return (result, *last_states)


def _call(
    kind: Kind, own: Sequence[Tensor], name_of: NameOf, inputs: Tensor, states: Tensor
) -> CellCall:
    weight_ih, weight_hh, bias_ih, bias_hh = [*map(name_of, own), None, None][:4]
    assert weight_ih is not None
    assert weight_hh is not None
    return CellCall(
        kind, weight_ih, weight_hh, bias_ih, bias_hh, inputs, states, tuple(p.detach() for p in own)
    )


@dataclass(frozen=True)
class LayerCall:
    """One use of a weight in a run: outputs = patches · weightᵀ + bias.

    `inputs` (rows, in) are the values that the weight's input axis reads, one column per position
    of that axis; `outputs` (rows, out), none of them before the layer runs. A convolution's rows
    are pixels.
    """

    weight: str
    bias: str | None
    in_axis: int  # of the weight
    out_axis: int
    inputs: Tensor
    outputs: Tensor
    window: Window | None = None  # of a convolution
    image: Tensor | None = None  # a convolution's input (samples, channels, …)

    @property
    def has_bias(self) -> bool:
        """Whether a parameter is added to the product."""
        return self.bias is not None

    @property
    def size(self) -> int:
        """How many numbers the weight has."""
        return self.reads * self.outputs.shape[1]

    @property
    def reads(self) -> int:
        """How many numbers one output is a sum over."""
        return self.inputs.shape[1] * (math.prod(self.window.kernel) if self.window else 1)

    def patches(self, rows: Tensor) -> Tensor:
        """Return what some rows of the outputs read: (rows, in × kernel positions)."""
        if self.window is None or self.image is None:
            return self.inputs[rows]
        return patches(self.image, self.window, rows)


Call: TypeAlias = LayerCall | CellCall
Hear: TypeAlias = Callable[[Call], object]
Place: TypeAlias = tuple[int, int]  # storage and offset


@dataclass(frozen=True)
class Heard:
    """What a run gave (None if it was ended), and how often each weight was used, told or not."""

    outputs: Any
    uses: Counter[str]


def run_heard(
    model: nn.Module, inputs: Sequence[Any], hear: Hear, *, is_ahead: bool = False
) -> Heard:
    """Run a model, and let `hear` know of uses of its weights.

    If `is_ahead`, each use is told before it is made, so that who changes the weights in place has
    the run go on with the new ones; what the layer gives is not known then.

    Weights are known by their first names in the state dict. Uses of a part of a weight, of a
    weight in another shape, with a bias that is no parameter, or of a transposed or grouped
    convolution's, are not told, but counted. Who raises `StopRun` has heard enough.
    """
    owners = {_place(tensor): (name, tensor) for name, tensor in float_tensors(model)[0].items()}
    ops, outputs = _Ops(owners, hear, is_ahead=is_ahead), None
    try:
        with eagerly(), torch.no_grad(), ops, _Functions(ops):
            outputs = run_model(model, inputs)
    except UserCodeError:
        if not ops.is_stopped:  # what the model's code makes of being ended
            raise
    return Heard(outputs, ops.uses)


def names_of(call: Call) -> tuple[str, ...]:
    """Return the weights of a call."""
    return (call.weight,) if isinstance(call, LayerCall) else (call.weight_ih, call.weight_hh)


class _Ops(EagerMode):  # type: ignore[no-untyped-call]
    """See products and convolutions with a parameter."""

    def __init__(
        self, owners: Mapping[Place, tuple[str, Tensor]], hear: Hear, *, is_ahead: bool
    ) -> None:
        super().__init__()
        self.owners = owners
        self.stored: dict[int, list[str]] = {}
        for (storage, _), (name, _) in owners.items():
            self.stored.setdefault(storage, []).append(name)
        self.hear = hear
        self.is_ahead = is_ahead
        self.is_paused = self.is_stopped = False
        self.uses: Counter[str] = Counter()  # of any part of a parameter, told or not

    def look_before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Count what an op uses, and tell of it ahead if it uses a whole weight."""
        if self.is_paused:
            return None
        if not func.is_view:
            self.count(args, kwargs)
        make = None if kwargs else _MAKERS.get(schema_of(func).name)  # α·x·W + β·b has some
        if make is not None and self.is_ahead:
            self.tell(make(self, args, None))
        return None if make is None else partial(make, self, args)

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Tell of an op that has run if it uses a whole weight."""
        if before is not None and not self.is_ahead:
            self.tell(before(result))
        return result

    def tell(self, call: Call | None) -> None:
        """Let who hears know of a call, if it is one.

        Until that one has heard enough. What is computed while hearing is no part of the run.
        """
        if call is None or self.is_stopped:
            return
        try:
            with self.paused(), own_code():
                self.hear(_detached(call))
        except StopRun:
            self.is_stopped = True
            raise

    def count(self, *given: Any) -> None:
        """Count a use of the parameters that nested values are, or are parts of."""
        for tensor in leaves(given):
            if isinstance(tensor, Tensor):
                place = _place(tensor)
                whole = self.owners.get(place)
                self.uses.update([whole[0]] if whole else self.stored.get(place[0], ()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Tell of nothing for a while."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def name(self, tensor: Tensor | None) -> str | None:
        """Return the name of the parameter that a tensor is, all of it."""
        found = None if tensor is None else self.owners.get(_place(tensor))
        if found is None or tensor is None or found[1].numel() != tensor.numel():
            return None
        return found[0]

    def whole(self, name: str) -> Tensor:
        """Return a parameter as the state dict has it."""
        return next(tensor for own, tensor in self.owners.values() if own == name)

    def in_axis(self, matrix: Tensor) -> int | None:
        """Return which axis of a parameter the rows of a matrix (in, out) are, if it is one."""
        name = self.name(matrix)
        if name is None:
            return None
        seen, own = (matrix.shape, matrix.stride()), self.whole(name)
        if own.dim() != 2:
            return None
        ways = ((own.shape, own.stride()), (own.T.shape, own.T.stride()))
        return ways.index(seen) if seen in ways else None


def _detached(call: Call) -> Call:
    """Return a call without gradients, which a model's code may ask for by itself."""
    values = vars(call).items()
    own: Any = {name: value.detach() for name, value in values if isinstance(value, Tensor)}
    changed: Call = replace(call, **own)
    return changed


class _Functions(TorchFunctionMode):
    """Run recurrent stacks layer by layer, so that every layer's states are seen."""

    def __init__(self, ops: _Ops) -> None:
        super().__init__()
        self.ops = ops

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; a recurrent stack's cells are told one by one."""
        name = getattr(func, "__name__", "")
        if self.ops.is_paused or name not in (*GATES, "linear"):
            return func(*args, **(kwargs or {}))
        with own_code():
            self.ops.count(args, kwargs)
        given = kwargs or {}
        is_linear = name == "linear"
        with self.ops.paused():
            if is_linear and self.ops.is_ahead:
                self._tell_linear(args, given, None)
            result: Any = None if is_linear else self._stack(name, func, args, given)
            if result is None:
                result = func(*args, **given)
            if is_linear and not self.ops.is_ahead:
                self._tell_linear(args, given, result)
            return result

    def _stack(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Any
    ) -> tuple[Tensor, ...] | None:
        """Run a recurrent stack; what fails is ours unless the function itself fails, too."""
        try:
            ops = self.ops
            return run_stack(name, args, ops.name, ops.tell, is_ahead=ops.is_ahead)
        except StopRun:
            raise
        except Exception:
            func(*args, **kwargs)
            with own_code():
                raise

    def _tell_linear(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor | None
    ) -> None:
        """Tell of a call of `functional.linear`, whose parts may add the bias later."""
        with own_code():
            named = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
            inputs = named["input"]
            rows = inputs.reshape(-1, inputs.shape[-1])
            outputs = None if result is None else result.reshape(-1, result.shape[-1])
            self.ops.tell(
                _matrix_call(self.ops, named.get("bias"), rows, named["weight"].T, outputs)
            )


def _matrix_call(
    ops: _Ops, bias: Tensor | None, left: Tensor, right: Tensor, result: Tensor | None
) -> LayerCall | None:
    """Return the call of rows times a weight (out, in) or (in, out)."""
    in_axis = ops.in_axis(right)
    if in_axis is None or not _is_known(ops, bias, right.shape[1]):
        return None
    name = ops.name(right)
    assert name is not None
    outputs = left.new_empty(0, right.shape[1]) if result is None else result
    return LayerCall(name, ops.name(bias), in_axis, 1 - in_axis, left, outputs)


def _convolution(ops: _Ops, args: Sequence[Any], result: Tensor | None) -> LayerCall | None:
    image, weight, bias, stride, padding, dilation, is_transposed, _, groups = args[:9]
    name = ops.name(weight)
    if name is None or is_transposed or groups != 1 or not _is_known(ops, bias, len(weight)):
        return None
    if ops.whole(name).shape[:2] != weight.shape[:2]:
        return None
    window = Window(tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(dilation))
    inputs = _channels_last(image)
    outputs = image.new_empty(0, len(weight)) if result is None else _channels_last(result)
    return LayerCall(name, ops.name(bias), 1, 0, inputs, outputs, window, image)


def _is_known(ops: _Ops, bias: Tensor | None, outputs: int) -> bool:
    """Return whether what is added is nothing, or a parameter with one number per output."""
    name = ops.name(bias)
    return bias is None or (name is not None and ops.whole(name).shape == (outputs,))


def _channels_last(image: Tensor) -> Tensor:
    """Return (samples, channels, …) as rows (pixels, channels)."""
    return image.movedim(1, -1).reshape(-1, image.shape[1])


def _place(tensor: Tensor) -> Place:
    """Return where a tensor's numbers are; recurrent weights on a GPU are parts of one storage."""
    if tensor.layout != torch.strided:
        return id(tensor), 0
    return storage_address(tensor), int(tensor.storage_offset())


_MAKERS: Mapping[str, Callable[[_Ops, Sequence[Any], Tensor | None], LayerCall | None]] = {
    "aten::mm": lambda ops, args, result: _matrix_call(ops, None, args[0], args[1], result),
    "aten::addmm": lambda ops, args, result: _matrix_call(ops, args[0], args[1], args[2], result),
    "aten::convolution": _convolution,
}
