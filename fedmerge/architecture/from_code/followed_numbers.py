"""Numbers of a model's data, followed through Python to where they decide or get out of sight."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import BuiltinFunctionType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Globals: TypeAlias = dict[str, Any]  # of a module


class Witness(Protocol):
    """Who is told what becomes of numbers."""

    def decides(self, value: bool, depends: bool) -> bool:
        """Return what Python is told where it goes one way or another."""

    def rounds(self, value: int, depends: bool) -> int:
        """Return what Python is told where a number becomes a whole one."""

    def turns(self) -> None:
        """Take note of a turn of a loop over a range of numbers that are followed."""

    def loses(self, how: str, depends: bool) -> None:
        """Take note that a number gets out of sight."""


_witness: ContextVar[Witness | None] = ContextVar("_witness", default=None)


@contextmanager
def telling(witness: Witness) -> Iterator[None]:
    """Let a witness be told for a while."""
    token = _witness.set(witness)
    try:
        yield
    finally:
        _witness.reset(token)


class Followed:
    """A number that may depend on data. Torch takes it for one whose value is known later.

    What Python makes of it is followed, too; what it is compared with is a decision.
    """

    def __init__(self, value: int | float, depends: bool) -> None:
        self.value, self.depends = value, depends

    def __deepcopy__(self, memo: Any) -> Followed:
        return self


class _Integer(Followed, torch.SymInt):
    """A whole number."""


class _Float(Followed, torch.SymFloat):
    """Any other number."""


class _Truth(Followed, torch.SymBool):
    """What a comparison gives."""


def followed(value: Any, depends: bool) -> Any:
    """Return numbers that are followed, in place of those in nested lists and tuples."""
    if isinstance(value, list | tuple):
        return type(value)(followed(part, depends) for part in value)
    if isinstance(value, bool):
        return _Truth(value, depends)
    if isinstance(value, int):
        return _Integer(value, depends)
    if isinstance(value, float):
        return _Float(value, depends)
    _lose("is of a kind that can't be followed", depends)
    return value


def plain(value: Any) -> Any:
    """Return a value with plain numbers in place of those that are followed."""
    if isinstance(value, Followed):
        return value.value
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(plain, value))
    if kind is dict:
        return {name: plain(part) for name, part in value.items()}
    if kind is slice:
        return slice(*map(plain, (value.start, value.stop, value.step)))
    return value.plain if isinstance(value, _Followable) else value


def has_integers(value: Any) -> bool:
    """Return whether there are whole numbers among nested values that are followed."""
    if isinstance(value, slice):
        return has_integers((value.start, value.stop, value.step))
    parts = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, list | tuple | dict)
    return any(map(has_integers, parts)) if is_nested else isinstance(value, _Integer)


def _depends(values: Sequence[Any]) -> bool:
    return any(
        value.depends if isinstance(value, Followed) else _depends(value)
        for value in values
        if isinstance(value, Followed | list | tuple)
    )


def _lose(how: str, depends: bool) -> None:
    witness = _witness.get()
    if witness is not None:
        witness.loses(how, depends)


def _computed(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Return what a function makes of numbers, followed."""
    given, depends = [plain(value) for value in values], _depends(values)
    result, witness = function(*given), _witness.get()
    is_rounded = type(result) is int and any(isinstance(value, float) for value in given)
    if is_rounded and witness is not None:
        result = witness.rounds(result, depends)
    return followed(result, depends)


def _decided(self: Followed) -> bool:
    """Return which way Python goes."""
    witness, value = _witness.get(), bool(self.value)
    return value if witness is None else witness.decides(value, self.depends)


def _operation(function: Callable[..., Any], *, is_reflected: bool = False) -> Any:
    def method(self: Followed, *others: Any) -> Any:
        if not all(isinstance(other, int | float | Followed | None) for other in others):
            return NotImplemented
        values = (*others, self) if is_reflected else (self, *others)
        return _computed(function, values)

    return method


def _departure(how: str, function: Callable[..., Any]) -> Any:
    def method(self: Followed, *others: Any) -> Any:
        _lose(how, self.depends)
        return function(self.value, *others)

    return method


_BOTH_SIDES: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "divmod": divmod,
    "pow": operator.pow,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_ONE_SIDE: Mapping[str, Callable[..., Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}
_DEPARTURES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "int": ("becomes a plain integer", int),
    "index": ("is looked up by, or counts, where that can't be seen", int),
    "float": ("becomes a plain number", float),
    "complex": ("becomes a complex number", complex),
    "hash": ("is looked up in a dictionary or a set", hash),
    "array": ("becomes numpy's", lambda value, *_: __import__("numpy").asarray(value)),
    "str": ("becomes text", str),
    "repr": ("becomes text", repr),
    "format": ("becomes text", format),
}
for _name, _function in _BOTH_SIDES.items():
    setattr(Followed, f"__{_name}__", _operation(_function))
    setattr(Followed, f"__r{_name}__", _operation(_function, is_reflected=True))
for _name, _function in _ONE_SIDE.items():
    setattr(Followed, f"__{_name}__", _operation(_function))
Followed.__bool__ = _decided  # type: ignore[attr-defined]
for _name in ("is_integer", "bit_length", "conjugate"):
    setattr(Followed, _name, _operation(operator.methodcaller(_name)))
for _name, (_how, _function) in _DEPARTURES.items():
    for _kind in (_Integer, _Truth) if _name == "index" else (Followed,):
        setattr(_kind, f"__{_name}__", _departure(_how, _function))


class _Range(Sequence[Any]):
    """The turns of a loop whose number is followed."""

    def __init__(self, *bounds: Any) -> None:
        self._turns, self._depends = range(*map(plain, bounds)), _depends(bounds)

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, place: Any) -> Any:
        """Return one turn."""
        witness = _witness.get()
        if witness is not None and self._depends:
            witness.turns()
        return followed(self._turns[plain(place)], self._depends)


class _Followable(type):
    """The kind of what stands for `int`, `float` and `range` in the user's modules."""

    plain: Any
    made: Any

    def __call__(cls, *values: Any, **named: Any) -> Any:
        """Return what the plain kind makes of values, followed if these are."""
        if not any(isinstance(value, Tensor | Followed) for value in values):
            return cls.plain(*values, **named)
        return cls.follow([v.item() if isinstance(v, Tensor) else v for v in values])

    def follow(cls, values: Sequence[Any]) -> Any:
        """Return what the kind makes of numbers."""
        return _computed(cls.plain, values)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain | cls.made)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.plain | cls.made)

    def __eq__(cls, other: object) -> bool:
        return other is cls.plain or other is cls

    def __hash__(cls) -> int:
        return hash(cls.plain)


class _IntegerKind(int, metaclass=_Followable):
    plain, made = int, _Integer | _Truth


class _FloatKind(float, metaclass=_Followable):
    plain, made = float, _Float


class _RangeKind(metaclass=_Followable):
    plain, made = range, _Range

    @classmethod
    def follow(cls, values: Sequence[Any]) -> Any:
        return _Range(*values)


def _length(value: Any) -> Any:
    return value.size(0) if isinstance(value, Tensor) and value.dim() else len(value)


def _mathematical(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `math` that follows numbers."""

    @wraps(function)
    def follow(*values: Any, **named: Any) -> Any:
        if not any(isinstance(value, Tensor | Followed | list | tuple) for value in values):
            return function(*values, **named)
        given = [v.item() if isinstance(v, Tensor) else v for v in values]
        return _computed(partial(function, **named), given)

    return follow


class _Mathematics:
    """The module `math`, with functions that follow numbers."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(math, name)
        return _mathematical(found) if callable(found) else found


_BUILTINS: Mapping[str, Any] = {
    "int": _IntegerKind,
    "float": _FloatKind,
    "range": _RangeKind,
    "len": _length,
}
_MATHEMATICS = _Mathematics()


@contextmanager
def following(modules: Sequence[Globals]) -> Iterator[None]:
    """Let what makes numbers plain follow them, for a while, in these modules of the user's."""
    changes = [(module, _followers(module)) for module in modules]
    before = [{name: module.get(name, _NOTHING) for name in new} for module, new in changes]
    for module, new in changes:
        module.update(new)
    try:
        yield
    finally:
        for (module, new), old in zip(changes, before, strict=True):
            for name, value in old.items():
                if module.get(name) is not new[name]:
                    continue  # the user's code has changed it meanwhile
                if value is _NOTHING:
                    del module[name]
                else:
                    module[name] = value


_NOTHING = object()


def _followers(module: Globals) -> Globals:
    """Return what stands for the builtins that a module uses, and for what it has of `math`."""
    found: Globals = {name: new for name, new in _BUILTINS.items() if name not in module}
    for name, value in module.items():
        if value is math:
            found[name] = _MATHEMATICS
        elif isinstance(value, BuiltinFunctionType) and value.__module__ == "math":
            found[name] = _mathematical(value)
    return found
