"""Branches on data: where values leave a model for Python, and what Python is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedmerge.architecture.from_code.callers import (
    are_counted,
    asking,
    is_called_by,
    is_filter,
    line_of,
    plain_locals,
    position,
    users_frames,
)
from fedmerge.architecture.from_code.dependence import Dependence, DynamicSizes
from fedmerge.architecture.from_code.dispatch import EagerMode, eagerly
from fedmerge.architecture.from_code.followed_numbers import (
    Globals,
    followed,
    following,
    has_integers,
    plain,
    telling,
)
from fedmerge.architecture.from_code.trace import tensors_in
from fedmerge.private_torch import schema_of, uncompiled
from fedmerge.user_code import own_code, run_model

Kind: TypeAlias = Literal["truth", "number", "shape", "array"]
Key: TypeAlias = tuple[Any, ...]  # the steps to a departure, the op, and how often it was there
Answers: TypeAlias = Mapping[Key, Any]

_SIZES = frozenset({"size", "numel", "nelement", "__len__", "__get__"})
_NUMBERS = frozenset({"__int__", "__float__", "__index__", "__complex__"})
_ARRAYS = frozenset({"numpy", "__array__", "__dlpack__", "__reduce_ex__"})
_TEXTS = frozenset({"__repr__", "__str__", "__format__"})
_TURNS = frozenset({"unbind", "__iter__", "tolist"})


@dataclass(frozen=True)
class Departure:
    """One value that left for Python."""

    key: Key
    kind: Kind
    value: Any  # of truths and numbers
    where: str  # file and line of the code that asked for it


@dataclass(frozen=True)
class Telling:
    """What models are told, and the modules of the user's in which numbers are followed."""

    answers: Answers = field(default_factory=dict)
    modules: tuple[Globals, ...] = ()


@dataclass(frozen=True)
class Ran:
    """What a run gave, and what the truths were by nature that Python was told otherwise."""

    outputs: Any
    truths: tuple[bool, ...]


_telling: ContextVar[Telling | None] = ContextVar("_telling", default=None)
_numbered: ContextVar[bool] = ContextVar("_numbered", default=False)


@contextmanager
def answering(told: Telling | None) -> Iterator[None]:
    """Let models be told these values in `run_forward`; None: nobody looks what they ask for."""
    token = _telling.set(told)
    try:
        yield
    finally:
        _telling.reset(token)


def is_numbered() -> bool:
    """Return whether the function of torch's that runs was given a whole number out of data."""
    return _numbered.get()


def run_forward(module: nn.Module, inputs: Sequence[Any], *, hint: str = "") -> Ran:
    """Run a model; where it asks for values, it is told what `answering` says."""
    told = _telling.get()
    if told is None:
        return Ran(run_model(module, inputs, hint=hint), ())
    ops = Leaving(told)
    outputs = watched(module, inputs, ops, hint=hint)
    return Ran(outputs, tuple(ops.truths))


def watched(module: nn.Module, inputs: Sequence[Any], ops: Leaving, *, hint: str = "") -> Any:
    """Run a model under the eyes of a mode."""
    with eagerly(), following(ops.told.modules), telling(ops), ops, _Functions(ops):
        return run_model(module, inputs, hint=hint)


class Leaving(EagerMode):  # type: ignore[no-untyped-call]
    """Sees values leave, tells Python what it shall be told, and notes what depends on data."""

    def __init__(self, told: Telling, dependence: Dependence | None = None) -> None:
        super().__init__()
        self.told, self.dependence = told, dependence
        self.sizes = DynamicSizes()
        self.departures: list[Departure] = []
        self.unseen: dict[str, str] = {}  # where numbers get out of sight → how
        self.asking: dict[int, Globals] = {}  # modules of the user's that ask for numbers
        self.truths: list[bool] = []
        self.is_paused = False
        self._hits: Counter[Key] = Counter()
        self._layers: dict[int, int] = {}
        self._turns: dict[Any, tuple[FrameType, dict[str, Any]]] = {}  # of loops, by their places

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Look whether an op's result is for Python."""
        args, kwargs = before
        given = tensors_in([*args, *kwargs.values()])
        depends = False
        if self.dependence is not None:
            with self.paused():
                depends = self.dependence.see(func, args, kwargs, result)
        kind = None if self.is_paused or not given else _kind_of(func, args, result)
        if kind is None:
            self.sizes.see(given, result)
            return result
        result = self.leave(schema_of(func).name, kind, result, depends, _CHANGES[kind])
        if kind == "shape":
            self.sizes.found(result, _axis_found(func, args))
        if kind == "number" and not is_called_by(_Functions.called.__code__):
            self.loses("is used by compiled code", depends)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no value for one that leaves for a while."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on data, as far as that is followed."""
        return self.dependence is not None and self.dependence.has(tensor)

    def leave(
        self, op: str, kind: Kind, value: Any, depends: bool, change: Callable[[Any, Any], Any]
    ) -> Any:
        """Return what Python is told of a value: another one if there is an answer."""
        place = (*self._steps(), op)
        key = (*place, self._hits[place])
        self._hits[place] += 1
        if depends and self.dependence is not None:
            self.dependence.has_left = True
            told = value if kind in ("truth", "number") else None
            frame = next(users_frames(), None)
            self.departures.append(Departure(key, kind, told, line_of(frame)))
            if kind == "truth" and frame is not None:
                self._count_turns(frame)
        if key not in self.told.answers:
            return value
        if kind == "truth":
            self.truths.append(value)
        return change(value, self.told.answers[key])

    def decides(self, value: bool, depends: bool) -> bool:
        """Return what Python is told where it goes one way or another by a number."""
        if self.dependence is not None:
            self.dependence.count()
        told: bool = self.leave("a comparison", "truth", value, depends, _told)
        return told

    def rounds(self, value: int, depends: bool) -> int:
        """Return what Python is told where a number becomes a whole one."""
        told: int = self.leave("a whole number", "number", value, depends, _told)
        return told

    def turns(self) -> None:
        """Take note of a turn of a loop over a range of numbers that are followed."""
        frame = next(users_frames(), None)
        if self.dependence is not None and frame is not None:
            self.dependence.count()
            self._count_turns(frame)

    def loses(self, how: str, depends: bool) -> None:
        """Take note that a number gets out of sight, unless torch takes it or nobody does."""
        frame = None if self.is_paused else asking(_Functions.called.__code__)
        if frame is None:
            return
        self.asking[id(frame.f_globals)] = frame.f_globals
        if depends and self.dependence is not None:
            self.dependence.has_left = True
            self.unseen.setdefault(line_of(frame), how)

    def _count_turns(self, frame: FrameType) -> None:
        """Take note if code decides by how often its data let a loop turn, or how many passed."""
        place, now = (id(frame), position(frame)), plain_locals(frame)
        _, before = self._turns.get(place, (frame, now))
        self._turns[place] = frame, now
        changed = {name for name in now if now[name] != before.get(name, now[name])}
        if is_filter(frame) or (changed and are_counted(frame, changed)):
            self.unseen.setdefault(line_of(frame), "says how many there are")

    def _steps(self) -> Iterator[tuple[Any, ...]]:
        """Yield the steps in the user's code that lead here, the innermost first.

        Of a layer whose method it is, they know how many others were met before it: the same
        code in two layers makes two steps, but in two turns of a loop it makes one.
        """
        for frame in users_frames():
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            place = id(owner) if isinstance(owner, nn.Module) else 0
            number = self._layers.setdefault(place, len(self._layers))
            yield code.co_filename, code.co_name, position(frame), number


class _Functions(TorchFunctionMode):
    """Sees numbers, lists, arrays and texts leave, and numbers come back."""

    def __init__(self, ops: Leaving) -> None:
        super().__init__()
        self.ops = ops

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; what it has for Python leaves as what is followed or told."""
        token = _numbered.set(has_integers([args, kwargs]))
        try:
            return self._told(func, plain(tuple(args)), plain(kwargs or {}))
        finally:
            _numbered.reset(token)

    def _told(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what Python is told of a function's result."""
        if self.ops.is_paused or not args or not isinstance(args[0], Tensor):
            return self.called(func, args, kwargs)
        tensor, name = args[0], getattr(func, "__name__", "").partition(".")[0]
        with own_code():
            self._look(tensor, name)
        if name in _ARRAYS or name == "tolist":
            with own_code(), self.ops.paused():
                depends = self.ops.depends(tensor)
                args = (self.ops.leave(name, "array", tensor, depends, _other_data), *args[1:])
        result = self.called(func, args, kwargs)
        if name == "item" and not isinstance(result, bool):
            return followed(result, self.ops.depends(tensor))
        if name == "tolist":
            return followed(result, self.ops.depends(tensor))
        if name in _SIZES and self.ops.sizes.of(tensor):
            return self._sizes(func, name, tensor, result)
        return result

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function of torch's gives, which is asked for in its own name."""
        return func(*args, **kwargs)

    def _look(self, tensor: Tensor, name: str) -> None:
        """Take note of what gets out of sight."""
        is_number = name in _NUMBERS and tensor.dtype != torch.bool
        if not is_number and name not in _ARRAYS | _TEXTS | _TURNS:
            return
        depends = self.ops.depends(tensor)
        if is_number:
            self.ops.loses("becomes a plain number", depends)
        elif name in _TURNS:
            if 0 in self.ops.sizes.of(tensor):
                self.ops.loses("is how many parts there are", depends)
        else:
            self.ops.loses("becomes text" if name in _TEXTS else "becomes numpy's", depends)

    def _sizes(self, func: Any, name: str, tensor: Tensor, sizes: Any) -> Any:
        """Return sizes of which some are counts of what was found in data."""
        depends, axes = self.ops.depends(tensor), self.ops.sizes.of(tensor)
        if name == "__get__" and getattr(func, "__self__", None) is not Tensor.shape:
            return sizes
        if name == "__len__":
            if 0 in axes:
                self.ops.loses("is a length", depends)
            return sizes
        if isinstance(sizes, int):
            is_count = name != "size" or any(tensor.shape[axis] == sizes for axis in axes)
            return followed(sizes, depends) if is_count else sizes
        return tuple(followed(n, depends) if k in axes else n for k, n in enumerate(sizes))


def _kind_of(func: Any, args: Sequence[Any], result: Any) -> Kind | None:
    """Return what of an op's result Python sees, or nothing."""
    if isinstance(result, bool):
        return "truth"
    if isinstance(result, int | float | complex):
        return "number"
    if torch.Tag.dynamic_output_shape not in func.tags:
        return None
    masks = (torch.bool, torch.uint8)
    is_index = schema_of(func).name == "aten::index"
    return "shape" if not is_index or any(t.dtype in masks for t in tensors_in(args[1])) else None


def _axis_found(func: Any, args: Sequence[Any]) -> int:
    """Return the axis along which an op gives what it has found."""
    if schema_of(func).name != "aten::index":
        return 0
    return next((k for k, index in enumerate(args[1]) if index is not None), 0)


def _first_rows(result: Any, rows: int) -> Any:
    """Return the result of an op that finds things, had it found only a few."""
    return result[:rows] if isinstance(result, Tensor) else result


OTHER_DATA: Mapping[str, Callable[[Tensor], Tensor]] = {  # of arrays that leave
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "negated": lambda data: ~data if data.dtype == torch.bool else -data,
    "large": lambda data: torch.full_like(data, 1) * 1000,
}


def _other_data(tensor: Tensor, way: str) -> Tensor:
    """Return a tensor of other numbers, of the same type."""
    return OTHER_DATA[way](tensor).to(tensor.dtype)


def _told(value: Any, answer: Any) -> Any:
    return answer


_CHANGES: Mapping[Kind, Callable[[Any, Any], Any]] = {
    "truth": _told,
    "number": _told,
    "shape": _first_rows,
    "array": _other_data,
}
