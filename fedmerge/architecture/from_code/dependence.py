"""What of a run depends on data: values, and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmerge.architecture.from_code.trace import storage_of, tensors_in
from fedmerge.private_torch import leaves, schema_of
from fedmerge.user_code import StopRun

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
        self.ops = 0
        self._most_ops, self._is_sketched = most_ops, is_sketched
        self._kept: list[Tensor] = [*inputs, *weights.values()]
        self._names = {storage_of(tensor): name for name, tensor in weights.items()}
        self._depends = {storage_of(tensor) for tensor in self._kept}
        self._known = set(self._depends)
        self.has_left = False  # whether Python has values that depend, and may bring them back

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Take note of an op, and return whether what it gives depends on the tensors."""
        self.count()
        given = [*args, *kwargs.values()]
        tensors = tensors_in(given)
        sources = tuple(self._sources(tensors))
        if self._is_sketched:
            self.sketch.append((str(func), *sources, *_whole_numbers(given)))
        depends = any(storage_of(tensor) in self._depends for tensor in tensors)
        depends = depends or (self.has_left and not tensors)
        name = schema_of(func).name
        made = [*tensors_in(result), *_written(func, args, kwargs)]
        if name in _LENGTHS_ONLY:
            lengths = args[_LENGTHS_ONLY[name]]
            self._keep([made.pop()], storage_of(lengths) in self._depends)
        self._keep(made, depends and name not in _SHAPES_ONLY)
        return depends

    def count(self) -> None:
        """Take note of a step, of which there may be too many."""
        self.ops += 1
        if self._most_ops is not None and self.ops > self._most_ops:
            raise StopRun("it takes no end")

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the tensors."""
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


class DynamicSizes:
    """Follows which sizes of tensors are counts of what was found in data.

    Of further tensors those sizes are that equal such a count, or no other size of what they are
    made of.
    """

    def __init__(self) -> None:
        self._axes: dict[int, frozenset[int]] = {}
        self._kept: list[Tensor] = []

    def found(self, result: Any, axis: int) -> None:
        """Take note of what an op has found, and along which axis."""
        for tensor in tensors_in(result):
            if axis < tensor.dim():
                self._put(tensor, frozenset([axis]))

    def see(self, given: Sequence[Tensor], result: Any) -> None:
        """Take note of any other op."""
        if self._axes.keys().isdisjoint(map(id, given)):
            return
        counts = {tensor.shape[axis] for tensor in given for axis in self.of(tensor)}
        sizes = {
            size
            for tensor in given
            for axis, size in enumerate(tensor.shape)
            if axis not in self.of(tensor)
        }
        for tensor in tensors_in(result):
            shape = enumerate(tensor.shape)
            axes = frozenset(k for k, size in shape if size in counts or size not in sizes | {1})
            if axes:
                self._put(tensor, axes)

    def of(self, tensor: Tensor) -> frozenset[int]:
        """Return the axes of a tensor that are as long as what was found."""
        return self._axes.get(id(tensor), frozenset())

    def _put(self, tensor: Tensor, axes: frozenset[int]) -> None:
        self._axes[id(tensor)] = axes
        self._kept.append(tensor)
