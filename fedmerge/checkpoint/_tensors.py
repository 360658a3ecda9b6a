"""One stored tensor: what is known of it at once, and how to get its values."""

import hashlib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from fedmerge.checkpoint._mapping import mapped_part
from fedmerge.types.arrays import Array
from fedmerge.types.clients import FLOAT_DTYPES, TensorInfo

INTEGER_DTYPES = (
    *("int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool"),
)
_BLOCK = 1 << 18  # numbers checked at once
_READ_FROM = 1 << 18  # bytes from which a mapped tensor is read from its file instead
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OBSTACLES: tuple[tuple[str, Callable[[torch.Tensor], bool]], ...] = (
    ("is not initialised", lambda tensor: bool(is_lazy(tensor))),
    ("is a nested tensor", lambda tensor: tensor.is_nested),
    ("is a meta tensor, which has no values", lambda tensor: tensor.is_meta),
    ("is quantised", lambda tensor: tensor.is_quantized),
    ("is sparse", lambda tensor: tensor.layout != torch.strided),
)


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor, and a function that loads a fresh contiguous copy."""

    info: TensorInfo
    load: Callable[[], torch.Tensor]
    problem: str = ""  # why it cannot be merged, e.g. "is sparse"
    memory: Hashable = None  # equal for two names of the same tensor, None if unknown

    @property
    def is_weight(self) -> bool:
        """Whether it looks like a layer's weights: neither integers nor a single number."""
        return self.info.dtype not in INTEGER_DTYPES and self.info.shape != ()


def stored(info: TensorInfo, load: Callable[[], torch.Tensor]) -> StoredTensor:
    """Describe a tensor of which only the header was read."""
    return StoredTensor(info, load, _dtype_problem(info.dtype))


def describe(tensor: torch.Tensor, *, most_bytes: int | None) -> StoredTensor:
    """Describe a loaded or memory-mapped tensor that may fill at most `most_bytes`."""
    dtype = dtype_name(tensor.dtype)
    for problem, applies in _OBSTACLES:
        if applies(tensor):
            return StoredTensor(TensorInfo(_shape(tensor), dtype), tensor.detach, problem)
    info = TensorInfo(_shape(tensor), dtype)
    problem = _dtype_problem(dtype)
    if most_bytes is not None and info.size * tensor.itemsize > most_bytes:
        problem = f"claims {info.size:,} numbers, more than its file can hold"
    return StoredTensor(info, lambda: _copy(tensor), problem, _memory(tensor))


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


def read_part(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor from its place in a file, read without a memory map.

    Pages of a map stay resident after their tensor is gone.
    """
    tensor = torch.empty(shape, dtype=dtype)
    target = raw_bytes(tensor)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        done = 0
        while done < target.nbytes:  # one call reads at most 2 GiB
            count = file.readinto(target[done:].data)
            if not count:
                raise EOFError("the file has become shorter since it was opened")
            done += count
    return tensor


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


def array_digest(array: Array, dtype: str) -> str:
    """Return the SHA-256 that `write_model` gives for an array written in a dtype."""
    return digest(from_array(array, dtype))


def _dtype_problem(dtype: str) -> str:
    supported = dtype in FLOAT_DTYPES or dtype in INTEGER_DTYPES
    return "" if supported else f"has dtype {dtype}, which fedmerge cannot merge"


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    known = not is_lazy(tensor) and not tensor.is_nested
    return tuple(tensor.shape) if known else ()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_neg().cpu()
    read = _read_mapped(plain)
    # Also where nothing was mapped: the caller owns what it gets.
    return plain.clone(memory_format=torch.contiguous_format) if read is None else read


def _read_mapped(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a large tensor that maps a file by reading the file; None if it is none such."""
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.numel() * tensor.itemsize
    if size < _READ_FROM or span != tensor.numel():
        return None
    place = mapped_part(tensor.data_ptr(), size)
    if place is None:
        return None
    flat = read_part(place.path, place.offset, (span,), tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).contiguous()


def _memory(tensor: torch.Tensor) -> Hashable:
    if tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
