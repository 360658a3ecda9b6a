"""Torch's own files, and what the names in their pickles stand for."""

import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from fedmerge.checkpoint.files import (
    RESAVE,
    Archive,
    Budget,
    Contents,
    ReadOptions,
    Region,
    SourceFile,
    damaged,
    listed,
    open_archive,
    reason_of,
)
from fedmerge.checkpoint.pickle_machine import (
    UNRESOLVED,
    Inert,
    Known,
    Trust,
    Uses,
    as_key,
    is_module,
)
from fedmerge.checkpoint.pickle_steps import PickleError, Unpickled, read_pickle
from fedmerge.checkpoint.pickled_modules import read_modules
from fedmerge.checkpoint.state_dicts import leaves
from fedmerge.checkpoint.tensors import StoredTensor, View, check_shape, dtype_name, stored, strided
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from fedmerge.values.clients import TensorInfo

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
_OPS = Known("torch._C._VariableFunctionsClass")  # relu and others are attributes of it
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
        f"{_TENSORS_MODULE}{name}": counted(function) for name, function in _TENSORS.items()
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
    known[_OPS.name] = _OPS
    return known


def _check(is_right: bool) -> None:
    if not is_right:
        raise ValueError("other arguments than torch writes")


def as_kind(value: object, kind: type[_Kind]) -> _Kind:
    """Return a value that must be of a kind."""
    _check(isinstance(value, kind))
    return cast(_Kind, value)


def _numbers(values: object) -> tuple[int, ...]:
    items = values if isinstance(values, list) else as_kind(values, tuple)
    _check(all(type(item) is int for item in items))
    return tuple(items)


def _dtype(value: object) -> torch.dtype:
    return as_kind(as_kind(value, Known).value, torch.dtype)


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
    base = as_kind(storage, Storage)
    is_negated = bool(marks) and isinstance(marks[0], dict) and bool(marks[0].get("neg"))
    return strided(
        base.locate,
        base.dtype if dtype is None else dtype,
        View(as_kind(offset, int), _numbers(size), _numbers(stride), is_negated),
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
    return as_kind(data, StoredTensor)


def _from_type(function: object, kind: object, arguments: object, state: object) -> object:
    """Return a tensor with attributes, or of a subclass, as the tensor it is.

    Only functions that make tensors: others would copy what nobody counted, or nest for ever.
    """
    known = as_kind(function, Known)
    if known.call is None or known.name.removeprefix(_TENSORS_MODULE) not in _TENSORS:
        raise ValueError("other arguments than torch writes")
    return known.call(*as_kind(arguments, tuple))


def _unusable(problem: str, size_at: int | None = None) -> Callable[..., StoredTensor]:
    """Return a function that describes a tensor which cannot be merged."""

    def describe(*arguments: object) -> StoredTensor:
        size = () if size_at is None else _numbers(arguments[size_at])
        check_shape(size, 1)
        return StoredTensor(TensorInfo(size, "float32"), lambda: torch.empty(0), problem)

    return describe


def _copied_to_device(data: object, dtype: object, *rest: object) -> StoredTensor:
    """Return a tensor of a device that has no storages, which was stored as one of the CPU's."""
    source, target = as_kind(data, StoredTensor), _dtype(dtype)
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
    pairs = given if isinstance(given, list) else as_kind(given, tuple)
    _check(all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs))
    return {as_key(key): value for key, value in pairs}


def _encoded(text: object, codec: object = "utf-8") -> Inert:
    """Return what stands for bytes that are written as text; nobody needs their value."""
    _check(len(as_kind(text, str)) <= _LONGEST_ENCODED and codec in _CODECS)
    return Inert("bytes")


def _bytes(*arguments: object) -> Inert:
    """Return what stands for a bytearray, which must not be asked for by its size."""
    _check(all(isinstance(argument, bytes | str | Inert) for argument in arguments))
    return Inert("bytearray")


def _names(*arguments: object) -> Inert:
    """Return what stands for a set, with what is in it."""
    items = arguments[0] if arguments else []
    _check(len(arguments) <= 1 and isinstance(items, list | tuple))
    return Inert("set", content=list(cast(list[object], items)))


def _op(owner: object, name: object) -> Inert:
    """Return what stands for one of torch's own functions, which modules have as attributes."""
    _check(owner is _OPS and isinstance(name, str))
    return Inert(_OPS.name)


def _small(name: str, *kinds: type) -> Callable[..., Inert]:
    """Return a function that takes a few plain values and keeps none."""

    def describe(*arguments: object) -> Inert:
        _check(len(arguments) <= 2 and all(isinstance(value, kinds) for value in arguments))
        return Inert(name)

    return describe


_TENSORS_MODULE = "torch._utils."
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
    "builtins.set": _names,
    "builtins.getattr": _op,
    "torch.nn.backends.thnn._get_thnn_function_backend": lambda: Inert("backend"),  # torch < 1.3
    "builtins.complex": _small("complex", int, float),
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encoded,
    "torch.Size": lambda *sizes: _numbers(sizes[0] if sizes else ()),
    "torch.device": _small("device", str, int),
    "torch.serialization._get_layout": _small("layout", str),
}


_LONGEST_NAME = 120  # characters of a global's name that are shown
_OF_TORCH = re.compile(r"torch\.(nn\.functional|nn\.modules\.\w+|_C\._nn)\.\w+")
_DANGEROUS = {  # modules whose code nobody needs to load weights
    *("os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "importlib", "runpy"),
    *("builtins", "pty", "webbrowser", "code", "ctypes", "pickle", "copyreg", UNRESOLVED),
}


def admitting(names: Sequence[str]) -> Callable[[str], bool]:
    """Return which names stand for inert objects, since the user admits them.

    Nobody needs those of modules that can do anything: what asks for them is no checkpoint.
    """
    admitted = {name for name in names if name.split(".")[0] not in _DANGEROUS}
    return admitted.__contains__


def is_harmless(name: str, uses: Uses) -> bool:
    """Whether nothing is done with a name but what pickled modules are made of.

    It is the class of modules that were made as torch makes them, or one of torch's own functions
    and modules that is an attribute. None is imported or called for that.
    """
    if name.split(".")[0] in _DANGEROUS or uses.calls != uses.modules:
        return False
    return uses.modules > 0 or _OF_TORCH.fullmatch(name) is not None


def understood(path: Path, read: Callable[[], Unpickled]) -> Unpickled:
    """Return what a pickle holds; refuse one that asks for code, or is damaged."""
    try:
        found = read()
    except PickleError as error:
        if error.asked:  # whatever else is wrong with it
            raise unsafe(path, error.asked) from error
        raise damaged(path, reason_of(error)) from error
    if found.asked:
        raise unsafe(path, found.asked)
    return found


def unsafe(path: Path, globals_: Sequence[str]) -> UnsafeCheckpointError:
    """Return the error of a file that asks for code."""
    asked = [ascii(name)[1:-1][:_LONGEST_NAME] for name in globals_]
    names = listed(asked, most=10)
    if any(name.split(".")[0] in _DANGEROUS for name in asked):
        hint = "do not load this file: such code can do anything to this machine"
    else:
        admit = " ".join(f"`allow_global={name}`" for name in asked[:5])
        hint = f"where you trust it, {RESAVE}; or admit what you know to be harmless: {admit}"
    return UnsafeCheckpointError(
        f"{path}: refused, it asks for code that nobody allowed: {names}", hint
    )


_PICKLE_RECORD = re.compile(r"[^/]+/data\.pkl")


def read_zip(file: SourceFile, options: ReadOptions) -> Contents:
    """Read a zip file of `torch.save`."""
    return Contents("torch zip", zip_tree(file.whole, options), (file,))


def zip_tree(region: Region, options: ReadOptions) -> object:
    """Return what `torch.save` put into a zip file, or into a record of another one."""
    archive = open_archive(region)
    record = _pickle_record(archive.path, archive.entries)
    root = record.removesuffix("data.pkl")
    check_byte_order(archive, root)
    storages = ArchiveStorages(archive, f"{root}data/")
    trust = trusting(region.file.budget, options, storages.load)
    content = archive.content(record)
    content.check()
    return with_modules(archive.path, lambda: read_pickle(content, trust)).value


def trusting(budget: Budget, options: ReadOptions, load: Callable[[Any], object]) -> Trust:
    """Return what names stand for where modules may be."""
    return Trust(tensor_names(budget), admitting(options.allow_globals), is_harmless, load)


def with_modules(path: Path, read: Callable[[], Unpickled]) -> Unpickled:
    """Return what a pickle holds; of the modules in it the tensors."""
    found = understood(path, read)
    modules = list(leaves(found.value, is_module))
    if modules:
        read_modules(modules, path)
    return found


def check_byte_order(archive: Archive, root: str) -> None:
    """Refuse numbers that this machine would read from the wrong end."""
    if f"{root}byteorder" not in archive.entries:
        return
    order = archive.read(f"{root}byteorder")[:16].decode("ascii", "replace")
    if order != sys.byteorder:
        raise CheckpointError(
            f"{archive.path}: numbers are {order}-endian, this machine is {sys.byteorder}-endian",
            "save the model's state dict with torch.save on the machine that made it",
        )


class ArchiveStorages:
    """The storages that a pickle refers to, each a record of its archive."""

    def __init__(self, archive: Archive, folder: str) -> None:
        self._archive = archive
        self._folder = folder

    def load(self, reference: Any) -> Storage:
        """Return the storage that a reference means."""
        dtype, key, count = storage_reference(reference)
        record = self._folder + key
        if record not in self._archive.entries:
            raise ValueError(f"its record '{record}' is missing")
        held = self._archive.entries[record].size
        if count * dtype.itemsize > held:
            raise ValueError(f"its record '{record}' has {held:,} bytes, too few for {count:,}")
        owner = (self._archive.region.file, self._archive.region.start, record)
        return Storage(dtype, count, owner, lambda: self._archive.content(record))


def storage_reference(reference: Any) -> tuple[torch.dtype, str, int]:
    """Return dtype, key and size from ("storage", kind, key, device, count, …)."""
    mark, kind, key, _, count = reference[:5]
    is_kind = isinstance(kind, Known) and isinstance(kind.value, torch.dtype)
    if mark != "storage" or not is_kind or not isinstance(key, str) or type(count) is not int:
        raise ValueError("a reference to something that is no storage")
    if count < 0:
        raise ValueError(f"a storage of {count:,} numbers")
    return kind.value, key, count


def _pickle_record(path: Path, names: Iterable[str]) -> str:
    records = [name for name in names if _PICKLE_RECORD.fullmatch(name)]
    if len(records) != 1:
        raise CheckpointError(f"{path}: a zip archive, but no torch checkpoint in it")
    return records[0]
