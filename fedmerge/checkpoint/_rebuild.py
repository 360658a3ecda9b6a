"""What the names in torch's pickles stand for here: functions that describe tensors, not make them.

Each takes the arguments that torch's function of that name takes, checks them, and returns a
`StoredTensor` whose values are read from the file when they are asked for.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch

from fedmerge.checkpoint._budget import Budget
from fedmerge.checkpoint._files import Region
from fedmerge.checkpoint._machine import Inert, Known, as_key
from fedmerge.checkpoint._tensors import (
    StoredTensor,
    View,
    check_shape,
    dtype_name,
    stored,
    strided,
)
from fedmerge.types.clients import TensorInfo

_Kind = TypeVar("_Kind")

_LONGEST_ENCODED = 1_000_000  # characters of bytes that are written as text
_CODECS = ("latin1", "latin-1", "utf-8", "utf8", "ascii")
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt8Storage": torch.quint8,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
    "UntypedStorage": torch.uint8,
    "_UntypedStorage": torch.uint8,
}
_SCHEMES = re.compile(r"per_(tensor|channel)_\w+")  # of quantised tensors


@dataclass(frozen=True, eq=False)
class Storage:
    """The numbers that tensors are views of."""

    dtype: torch.dtype
    count: int
    owner: Hashable  # what tells it from all others, of any file
    locate: Callable[[], Region]  # where its bytes lie, which a legacy file says at its end


def tensor_names(budget: Budget) -> dict[str, Known]:
    """Return the table of all names that tensors and plain containers are made of.

    The tensors that are made by it count.
    """

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: Any) -> object:
            budget.take_tensors()
            return function(*arguments)

        return call

    calls: dict[str, Callable[..., object]] = {
        f"torch._utils.{name}": counted(function) for name, function in _TENSORS.items()
    }
    calls["torch._tensor._rebuild_from_type_v2"] = _from_type
    calls["torch.nn.parameter.Parameter"] = _parameter
    calls |= _CONTAINERS
    return {**_values(), **{name: Known(name, call=call) for name, call in calls.items()}}


@cache
def _values() -> Mapping[str, Known]:
    """Return the names that stand for values: dtypes, kinds of storages, classes of tensors."""
    known = {
        f"{module}.{name}": Known(name, value=dtype)
        for name, dtype in _STORAGES.items()
        for module in ("torch", "torch.cuda", "torch.storage")
    }
    for name, value in vars(torch).items():
        is_scheme = isinstance(value, torch.qscheme) and _SCHEMES.fullmatch(name)
        if isinstance(value, torch.dtype) or is_scheme:
            known[f"torch.{name}"] = Known(name, value=value)
    known["torch.Tensor"] = Known("torch.Tensor")
    return known


def _check(is_right: bool) -> None:
    if not is_right:
        raise ValueError("other arguments than torch writes")


def _as(value: object, kind: type[_Kind]) -> _Kind:
    _check(isinstance(value, kind))
    return cast(_Kind, value)


def _numbers(values: object) -> tuple[int, ...]:
    items = values if isinstance(values, list) else _as(values, tuple)
    _check(all(type(item) is int for item in items))
    return tuple(items)


def _dtype(value: object) -> torch.dtype:
    return _as(_as(value, Known).value, torch.dtype)


def _view(
    storage: object,
    *place: object,
    dtype: torch.dtype | None = None,
    marks: Sequence[object] = (),
) -> StoredTensor:
    """Return the tensor that is a view of a storage, if it lies within it.

    `place`: offset, size and stride. `marks`: of tensors that are negated lazily.
    """
    offset, size, stride = place
    base = _as(storage, Storage)
    is_negated = bool(marks) and isinstance(marks[0], dict) and bool(marks[0].get("neg"))
    return strided(
        base.locate,
        base.dtype if dtype is None else dtype,
        View(_as(offset, int), _numbers(size), _numbers(stride), is_negated),
        held=base.count * base.dtype.itemsize,
        owner=base.owner,
    )


def _tensor(storage: object, offset: object, size: object, stride: object) -> StoredTensor:
    return _view(storage, offset, size, stride)


def _tensor_v2(
    storage: object, offset: object, size: object, stride: object, *rest: object
) -> StoredTensor:
    """Rest: requires_grad, hooks, marks."""
    _check(len(rest) in (2, 3))
    return _view(storage, offset, size, stride, marks=rest[2:])


def _tensor_v3(
    storage: object, offset: object, size: object, stride: object, *rest: object
) -> StoredTensor:
    """Rest: requires_grad, hooks, dtype, marks."""
    _check(len(rest) in (3, 4))
    return _view(storage, offset, size, stride, dtype=_dtype(rest[2]), marks=rest[3:])


def _parameter(data: object, *rest: object) -> StoredTensor:
    """Rest: requires_grad, hooks, state."""
    _check(len(rest) <= 3)
    return _as(data, StoredTensor)


def _from_type(function: object, kind: object, arguments: object, state: object) -> object:
    """Return a tensor with attributes, or of a subclass, as the tensor it is."""
    call = _as(function, Known).call
    if call is None or call is _from_type:  # which could nest for ever
        raise ValueError("other arguments than torch writes")
    return call(*_as(arguments, tuple))


def _unusable(problem: str, size_at: int | None = None) -> Callable[..., StoredTensor]:
    """Return a function that describes a tensor which cannot be merged."""

    def describe(*arguments: object) -> StoredTensor:
        size = () if size_at is None else _numbers(arguments[size_at])
        check_shape(size, 1)
        return StoredTensor(TensorInfo(size, "float32"), lambda: torch.empty(0), problem)

    return describe


def _copied_to_device(data: object, dtype: object, *rest: object) -> StoredTensor:
    """Return a tensor of a device that has no storages, which was stored as one of the CPU's."""
    source, target = _as(data, StoredTensor), _dtype(dtype)
    info = TensorInfo(source.info.shape, dtype_name(target))
    if source.problem:
        return replace(source, info=info)
    return stored(info, lambda: source.load().to(target), source.reads)


def _mapping(*arguments: object) -> dict[object, object]:
    """Return an empty dictionary, one of pairs or one of another dictionary."""
    _check(len(arguments) <= 1)
    given = arguments[0] if arguments else {}
    if isinstance(given, dict):
        return dict(given)
    pairs = given if isinstance(given, list) else _as(given, tuple)
    _check(all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs))
    return {as_key(key): value for key, value in pairs}


def _encoded(text: object, codec: object = "utf-8") -> Inert:
    """Return what stands for bytes that are written as text; nobody needs their value."""
    _check(len(_as(text, str)) <= _LONGEST_ENCODED and codec in _CODECS)
    return Inert("bytes")


def _bytes(*arguments: object) -> Inert:
    """Return what stands for a bytearray, which must not be asked for by its size."""
    _check(all(isinstance(argument, bytes | str | Inert) for argument in arguments))
    return Inert("bytearray")


def _small(name: str, *kinds: type) -> Callable[..., Inert]:
    """Return a function that takes a few plain values and keeps none."""

    def describe(*arguments: object) -> Inert:
        _check(len(arguments) <= 2 and all(isinstance(value, kinds) for value in arguments))
        return Inert(name)

    return describe


_TENSORS: Mapping[str, Callable[..., object]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_qtensor": _unusable("is quantised", 2),
    "_rebuild_sparse_tensor": _unusable("is sparse"),
    "_rebuild_meta_tensor_no_storage": _unusable("is a meta tensor, which has no values", 1),
    "_rebuild_nested_tensor": _unusable("is a nested tensor"),
    "_rebuild_wrapper_subclass": _unusable("is of a class that wraps other tensors"),
    "_rebuild_device_tensor_from_numpy": _unusable("is stored as a numpy array"),
    "_rebuild_device_tensor_from_cpu_tensor": _copied_to_device,
}
_CONTAINERS: Mapping[str, Callable[..., object]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "builtins.set": _small("set", list, tuple),
    "builtins.complex": _small("complex", int, float),
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encoded,
    "torch.Size": lambda *sizes: _numbers(sizes[0] if sizes else ()),
    "torch.device": _small("device", str, int),
    "torch.serialization._get_layout": _small("layout", str),
}
