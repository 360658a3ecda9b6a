"""Branches on data: which values depend on inputs, and where they leave for Python."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedmerge.architecture.from_code.dispatch import EagerMode, eagerly
from fedmerge.architecture.from_code.trace import storage_of, tensors_in
from fedmerge.private_torch import leaves, schema_of, uncompiled
from fedmerge.tracebacks import shown_line
from fedmerge.user_code import StopRun, own_code, run_model

_SHAPES_ONLY = frozenset(  # ops that look at a tensor's shape alone
    f"aten::{name}"
    for name in (
        *("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)
_LENGTHS_ONLY = {  # ops whose second result looks at their second argument alone
    "aten::_pack_padded_sequence": 1,
    "aten::_pad_packed_sequence": 1,
}
_MOST_HASHED = 1 << 16  # numbers of a constant that the sketch knows by their values


class Dependence:
    """Follows what depends on some tensors; their storages are the keys, and are kept alive.

    Two runs with the same sketch did the same with other numbers: the same ops, on the same
    weights and constants, with the same whole numbers as arguments.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        weights: Mapping[str, Tensor],
        *,
        most_ops: int | None,
        is_sketched: bool,
    ) -> None:
        self.sketch: list[Any] = []
        self.flow: list[Any] = []  # the same without whole numbers
        self.ops = 0
        self._most_ops, self._is_sketched = most_ops, is_sketched
        self._kept: list[Tensor] = [*inputs, *weights.values()]
        self._names = {storage_of(tensor): name for name, tensor in weights.items()}
        self._depends = {storage_of(tensor) for tensor in self._kept}
        self._known = set(self._depends)
        self.has_left = False  # whether Python has values that depend, and may bring them back

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Take note of an op, and return whether what it gives depends on the tensors."""
        self.ops += 1
        if self._most_ops is not None and self.ops > self._most_ops:
            raise StopRun("it takes no end")
        given = [*args, *kwargs.values()]
        tensors = tensors_in(given)
        sources = tuple(self._sources(tensors))
        if self._is_sketched:
            self.flow.append((str(func), *sources))
            self.sketch.append((self.flow[-1], *_whole_numbers(given)))
        depends = any(storage_of(tensor) in self._depends for tensor in tensors)
        depends = depends or (self.has_left and not tensors)
        name = schema_of(func).name
        made = [*tensors_in(result), *_written(func, args, kwargs)]
        if name in _LENGTHS_ONLY:
            lengths = args[_LENGTHS_ONLY[name]]
            self._keep([made.pop()], storage_of(lengths) in self._depends)
        self._keep(made, depends and name not in _SHAPES_ONLY)
        return depends

    def is_part(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the tensors."""
        self.flow.append(tuple(self._sources([tensor])))
        return storage_of(tensor) in self._depends

    def _keep(self, tensors: Sequence[Tensor], depends: bool) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            self._known.add(storage)
            self._kept.append(tensor)
            if depends:
                self._depends.add(storage)

    def _sources(self, tensors: Sequence[Tensor]) -> Iterator[Any]:
        """Yield the weights and constants among tensors, these by their values."""
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage in self._names:
                yield self._names[storage]
            if storage not in self._known:
                self._keep([tensor], self.has_left)
                yield _fingerprint(tensor) if self._is_sketched else None


def _fingerprint(tensor: Tensor) -> Any:
    if tensor.numel() > _MOST_HASHED or storage_of(tensor) == id(tensor):
        return tuple(tensor.shape)
    values = tensor.detach().to("cpu").contiguous().view(-1)
    return tuple(tensor.shape), hashlib.sha256(repr(values.tolist()).encode()).hexdigest()


def _whole_numbers(given: Sequence[Any]) -> Iterator[Any]:
    """Yield arguments that say what is done; a factor or a bound says only how much."""
    for value in leaves(given):
        if not isinstance(value, Tensor | float | complex):
            yield repr(value)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an op changes in place."""
    if not schema_of(func).is_mutable:
        return []
    named = zip(schema_of(func).arguments, args, strict=False)
    written = [value for own, value in named if own.alias_info and own.alias_info.is_write]
    return tensors_in([*written, *(kwargs[name] for name in ("out",) if name in kwargs)])


Kind: TypeAlias = Literal["truth", "number", "shape", "array", "text"]
Key: TypeAlias = tuple[Any, ...]  # the steps to a departure, the op, and how often it was there
Answers: TypeAlias = Mapping[Key, Any]

_NOT_USERS = (
    f"{Path(__file__).parents[2]}{os.sep}",  # fedmerge's
    f"{Path(torch.__file__).parent}{os.sep}",
    "<frozen",  # Python's
)
_INSTRUCTION = 2  # bytes
_ARRAYS = frozenset({"numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__"})
_TEXTS = frozenset({"__repr__", "__str__", "__format__"})
_answers: ContextVar[Answers] = ContextVar("_answers", default={})  # noqa: B039 (never changed)


@dataclass(frozen=True)
class Departure:
    """One value that left for Python."""

    key: Key
    kind: Kind
    value: Any  # of truths and numbers
    where: str  # file and line of the code that asked for it


@dataclass(frozen=True)
class Ran:
    """What a run gave, and what the truths were by nature that Python was told otherwise."""

    outputs: Any
    truths: tuple[bool, ...]


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Let models be told these values in `run_forward`."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def run_forward(module: nn.Module, inputs: Sequence[Any], *, hint: str = "") -> Ran:
    """Run a model; where it asks for values, it is told what `answering` says."""
    answers = _answers.get()
    if not answers:
        return Ran(run_model(module, inputs, hint=hint), ())
    ops = Leaving(answers)
    outputs = watched(module, inputs, ops, hint=hint)
    return Ran(outputs, tuple(ops.truths))


def watched(module: nn.Module, inputs: Sequence[Any], ops: Leaving, *, hint: str = "") -> Any:
    """Run a model under the eyes of a mode."""
    with eagerly(), ops, _Functions(ops):
        return run_model(module, inputs, hint=hint)


class Leaving(EagerMode):  # type: ignore[no-untyped-call]
    """Sees values leave, tells Python what it shall be told, and notes what depends on data."""

    def __init__(self, answers: Answers, dependence: Dependence | None = None) -> None:
        super().__init__()
        self.answers, self.dependence = answers, dependence
        self.departures: list[Departure] = []
        self.truths: list[bool] = []
        self.is_paused = False
        self._hits: Counter[Key] = Counter()
        self._layers: dict[int, int] = {}

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
            return result
        return self.leave(schema_of(func).name, kind, result, depends, _CHANGES[kind])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no value for one that leaves for a while."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

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
            self.departures.append(Departure(key, kind, told, _line(_users_frame())))
        if key not in self.answers:
            return value
        if kind == "truth":
            self.truths.append(value)
        return change(value, self.answers[key])

    def _steps(self) -> Iterator[tuple[Any, ...]]:
        """Yield the steps in the user's code that lead here, the innermost first.

        Of a layer whose method it is, they know how many others were met before it: the same
        code in two layers makes two steps, but in two turns of a loop it makes one.
        """
        for frame in _users_frames():
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            place = id(owner) if isinstance(owner, nn.Module) else 0
            number = self._layers.setdefault(place, len(self._layers))
            yield code.co_filename, code.co_name, _position(frame), number


class _Functions(TorchFunctionMode):
    """Sees what leaves without any op: arrays, lists, texts."""

    def __init__(self, ops: Leaving) -> None:
        super().__init__()
        self.ops = ops

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, with other data if Python shall be told others."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        is_known = name in _ARRAYS or name in _TEXTS
        if not is_known or self.ops.is_paused or not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        with self.ops.paused():
            with own_code():
                kind: Kind = "text" if name in _TEXTS else "array"
                seen = self.ops.dependence
                depends = seen is not None and seen.is_part(args[0])
                given = self.ops.leave(name, kind, args[0], depends, _CHANGES[kind])
            return func(given, *args[1:], **kwargs)


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


def _unchanged(value: Any, answer: Any) -> Any:
    return value


_CHANGES: Mapping[Kind, Callable[[Any, Any], Any]] = {
    "truth": _told,
    "number": _told,
    "shape": _first_rows,
    "array": _other_data,
    "text": _unchanged,
}


def _users_frames() -> Iterator[FrameType]:
    """Yield the frames of the run that are neither torch's nor fedmerge's, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not run_model.__code__:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_USERS):
            yield frame
        frame = frame.f_back


def _position(frame: FrameType) -> Any:
    """Return where in the text of the code a frame is.

    Bytecode is changed while it runs, so that its own numbers differ from run to run.
    """
    if sys.version_info < (3, 11):
        return frame.f_lineno
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // _INSTRUCTION, None))


def _users_frame() -> FrameType | None:
    return next(_users_frames(), None)


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return "a layer of torch"
    return shown_line(frame.f_code.co_filename, frame.f_lineno)
