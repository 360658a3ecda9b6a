"""One stored tensor: what is known of it at once, and how to get its values."""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from fedmerge.checkpoint.files import Region
from fedmerge.decoding import FLOAT_DTYPES
from fedmerge.values.arrays import Array
from fedmerge.values.clients import TensorInfo

INTEGER_DTYPES = (
    *("int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool"),
)
_BLOCK = 1 << 18  # numbers checked at once
# All numbers of a tensor: as an array, or in flat pieces in the dtype in which it is written.
Values: TypeAlias = Array | Iterable[torch.Tensor]
_MOST_AXES = 32  # as numpy knows them
_MOST_BYTES = 1 << 62  # that a shape may stand for, its zeros left out
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OBSTACLES: tuple[tuple[str, Callable[[torch.Tensor], bool]], ...] = (
    ("is not initialised", lambda tensor: bool(is_lazy(tensor))),
    ("is a nested tensor", lambda tensor: tensor.is_nested),
    ("is a meta tensor, which has no values", lambda tensor: tensor.is_meta),
    ("is quantised", lambda tensor: tensor.is_quantized),
    ("is sparse", lambda tensor: tensor.layout != torch.strided),
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape and dtype of a tensor, and a function that loads a fresh contiguous copy."""

    info: TensorInfo
    load: Callable[[], torch.Tensor]
    problem: str = ""  # why it cannot be merged, e.g. "is sparse"
    memory: Hashable = None  # equal for two names of the same tensor, None if unknown
    reads: int = 0  # bytes of its file that loading it reads
    parts: Callable[[int], Iterator[torch.Tensor]] | None = None  # how `pieces` are read, if so

    def pieces(self, most: int) -> Iterator[torch.Tensor]:
        """Yield its numbers in their order as flat tensors of at most `most`."""
        if self.parts is not None:
            yield from self.parts(most)
        elif self.info.size:
            yield from torch.split(self.load().reshape(-1), most)

    def within(self, most_bytes: int) -> "StoredTensor":
        """Return the tensor; with a problem if it claims more bytes than its file can hold."""
        if self.problem or self.info.size * torch_dtype(self.info.dtype).itemsize <= most_bytes:
            return self
        return replace(
            self, problem=f"claims {self.info.size:,} numbers, more than its file can hold"
        )

    @property
    def is_weight(self) -> bool:
        """Whether it looks like a layer's weights: neither integers nor a single number."""
        return self.info.dtype not in INTEGER_DTYPES and self.info.shape != ()


def stored(info: TensorInfo, load: Callable[[], torch.Tensor], reads: int = 0) -> StoredTensor:
    """Describe a tensor of which only the header was read."""
    return StoredTensor(info, load, _dtype_problem(info.dtype), reads=reads)


def describe(tensor: torch.Tensor) -> StoredTensor:
    """Describe a tensor in memory."""
    dtype = dtype_name(tensor.dtype)
    for problem, applies in _OBSTACLES:
        if applies(tensor):
            return StoredTensor(TensorInfo(_shape(tensor), dtype), tensor.detach, problem)
    info = TensorInfo(_shape(tensor), dtype)
    return StoredTensor(info, lambda: _copy(tensor), _dtype_problem(dtype), _memory(tensor))


@dataclass(frozen=True, slots=True)
class View:
    """Which numbers of a storage a tensor is made of, in which order."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_negated: bool = False

    @staticmethod
    def dense(size: tuple[int, ...]) -> "View":
        """Return the view of numbers that lie one after the other."""
        stride = [1]
        for length in size[:0:-1]:
            stride.insert(0, stride[0] * max(1, length))
        return View(0, size, tuple(stride[len(stride) - len(size) :]))

    @property
    def span(self) -> int:
        """How many numbers of the storage lie between the first and the last, both included."""
        steps = zip(self.size, self.stride, strict=True)
        return 1 + sum((n - 1) * step for n, step in steps)


def strided(
    locate: Callable[[], Region], dtype: torch.dtype, view: View, *, held: int, owner: Hashable
) -> StoredTensor:
    """Describe a tensor that is a view of `held` bytes of a file; refuse what lies outside.

    `locate` says where these bytes are once they are needed. `owner` tells them from all others
    of any file, None if no two tensors can be views of the same.
    """
    check_shape(view.size, dtype.itemsize)
    if len(view.size) != len(view.stride) or min((*view.stride, view.offset)) < 0:
        raise ValueError(f"sizes {view.size}, strides {view.stride} and offset {view.offset}")
    info = TensorInfo(view.size, dtype_name(dtype))
    if 0 in view.size:
        return stored(info, lambda: torch.empty(view.size, dtype=dtype))
    span, count = view.span, held // dtype.itemsize
    last = view.offset + span
    if last > count:
        raise ValueError(f"a tensor reaches number {last:,} of {count:,}")
    is_dense = view.stride == View.dense(view.size).stride and not view.is_negated
    return StoredTensor(
        info,
        lambda: _read_view(locate(), dtype, view),
        _dtype_problem(info.dtype),
        memory=None if owner is None else (owner, view, info.dtype),
        reads=span * dtype.itemsize,
        parts=(lambda most: _read_parts(locate(), dtype, view, most)) if is_dense else None,
    )


def check_shape(shape: Sequence[int], itemsize: int) -> None:
    """Refuse a shape that no tensor can have."""
    if len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor has {len(shape):,} axes")
    if min(shape, default=0) < 0 or math.prod(max(1, n) for n in shape) * itemsize > _MOST_BYTES:
        raise ValueError(f"a tensor has the shape {tuple(shape)}")


def _read_view(region: Region, dtype: torch.dtype, view: View) -> torch.Tensor:
    """Return a view of a storage as a contiguous tensor, read without a memory map."""
    flat = torch.empty(view.span, dtype=dtype)
    target = raw_bytes(flat).data
    region.read_into(target, view.offset * dtype.itemsize)
    region.check(target if target.nbytes == region.size else None)
    tensor = flat.as_strided(view.size, view.stride).contiguous()
    return -tensor if view.is_negated else tensor


def _read_parts(
    region: Region, dtype: torch.dtype, view: View, most: int
) -> Iterator[torch.Tensor]:
    """Yield a dense view of a storage as flat tensors of at most `most` numbers."""
    region.check()
    for begin in range(0, view.span, most):
        flat = torch.empty(min(most, view.span - begin), dtype=dtype)
        region.read_into(raw_bytes(flat).data, (view.offset + begin) * dtype.itemsize)
        yield flat


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` called so."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def to_array(tensor: torch.Tensor) -> Array:
    """Return a contiguous CPU tensor as numpy, half precision widened to float32."""
    array: Array = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def from_array(array: Array, dtype: str) -> torch.Tensor:
    """Return an array as a contiguous tensor of a dtype, which may share the array's memory."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(torch_dtype(dtype))


def to_torch(array: Array, dtype: str) -> torch.Tensor:
    """Return an array as a new tensor of a dtype, converted as `write_model` does."""
    return from_array(array, dtype).clone()


def raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor without copying them, shape (bytes,)."""
    if tensor.numel() == 0:  # its strides may be 0, which torch refuses to view as bytes
        return np.empty(0, dtype=np.uint8)
    array: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def non_finite(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many values of a contiguous tensor are NaN and how many infinite.

    The sum of a block's squares is finite only if all values are; where it is not, large values
    may have overflowed, and the block is counted.
    """
    nan = infinite = 0
    for block in torch.split(tensor.reshape(-1), _BLOCK):
        wide = to_array(block)
        with np.errstate(all="ignore"):
            squares = float(np.dot(wide, wide))  # 15 times faster than torch.isfinite
        if not math.isfinite(squares):
            nan += int(torch.isnan(block).sum())
            infinite += int(torch.isinf(block).sum())
    return nan, infinite


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a contiguous CPU tensor's bytes."""
    return hashlib.sha256(raw_bytes(tensor).data).hexdigest()


def values_digest(values: Values, dtype: str) -> str:
    """Return the SHA-256 that `write_model` gives for values written in a dtype."""
    if isinstance(values, np.ndarray):
        return digest(from_array(values, dtype))
    content = hashlib.sha256()
    for piece in values:
        content.update(raw_bytes(piece).data)
    return content.hexdigest()


def _dtype_problem(dtype: str) -> str:
    supported = dtype in FLOAT_DTYPES or dtype in INTEGER_DTYPES
    return "" if supported else f"has dtype {dtype}, which fedmerge cannot merge"


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    known = not is_lazy(tensor) and not tensor.is_nested
    return tuple(tensor.shape) if known else ()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_neg().cpu()
    return plain.clone(memory_format=torch.contiguous_format)  # the caller owns what it gets


def _memory(tensor: torch.Tensor) -> Hashable:
    if tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
