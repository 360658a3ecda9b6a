"""Values that leave a model for Python, which may decide by them, and what Python is told instead.

A run is watched op by op. What depends on inputs or weights and becomes a number, a list, an array
of numpy's, a shape or a text is a departure. A departure is known by the lines of code that lead to
it, so that another run, of a copy with other weights too, can be answered there as one likes.
"""

from __future__ import annotations

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

from fedmerge.graph.model.call import tensors_in
from fedmerge.graph.model.dependence import Dependence
from fedmerge.graph.model.dispatch import EagerMode, eagerly, uncompiled
from fedmerge.tracebacks import shown_line
from fedmerge.user_code import own_code, run_model

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
        return self.leave(func._schema.name, kind, result, depends, _CHANGES[kind])

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
    is_index = func._schema.name == "aten::index"
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
