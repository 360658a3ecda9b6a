"""One tensor of an exported program: described in JSON, its bytes in a record of the archive."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedmerge.checkpoint._archive import Archive
from fedmerge.checkpoint._contents import ReadOptions
from fedmerge.checkpoint._failures import damaged
from fedmerge.checkpoint._tensors import StoredTensor, View, strided, torch_dtype
from fedmerge.checkpoint._torch_files import zip_tree
from fedmerge.errors import CheckpointError
from fedmerge.types.programs import DTYPES

Tensors: TypeAlias = dict[str, Any]

_STRIDED = 7  # the number of torch.strided


@dataclass(frozen=True)
class Payload:
    """Where a tensor lies in the archive, and how its numbers lie in its record."""

    record: str
    is_pickled: bool
    meta: Mapping[str, Any] | None

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> "Payload":
        """Return what a weights or constants config says of one tensor."""
        return Payload(
            record=str(described["path_name"]),
            is_pickled=bool(described["use_pickle"]),
            meta=described.get("tensor_meta"),
        )


def read_payload(
    archive: Archive, folder: str, name: str, payload: Payload, options: ReadOptions
) -> object:
    """Return a tensor; an object that is no tensor stays None."""
    record = folder + payload.record
    if "/" in payload.record or "\\" in payload.record or payload.record in ("", ".", ".."):
        raise CheckpointError(
            f"{archive.path}: '{name}' names a record outside its folder: {payload.record!r}",
            "do not trust this file",
        )
    if record not in archive.entries:
        raise damaged(archive.path, f"'{name}' names the record '{record}', which is missing")
    if payload.meta is None:
        return None
    if payload.is_pickled:
        return zip_tree(archive.content(record), options)
    return _strided(archive, record, name, payload.meta)


def _strided(archive: Archive, record: str, name: str, meta: Mapping[str, Any]) -> StoredTensor:
    """Return the view of a record's numbers that a tensor is, if it lies within them."""
    if meta["layout"] != _STRIDED or meta["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{archive.path}: '{name}' is sparse or has an unknown dtype",
            "save dense tensors of dtype float64, float32, float16, bfloat16, int or bool",
        )
    dtype = torch_dtype(DTYPES[meta["dtype"]])
    (offset,) = _numbers([meta["storage_offset"]])
    view = View(offset, _numbers(meta["sizes"]), _numbers(meta["strides"]))
    region = archive.content(record)
    try:
        return strided(lambda: region, dtype, view, held=region.size, owner=(archive.path, record))
    except ValueError as error:
        raise damaged(archive.path, f"'{name}': {error}") from error


def _numbers(described: list[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return sizes that are written as {"as_int": n}; symbols have no place in stored tensors."""
    numbers = tuple(entry["as_int"] for entry in described)
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"sizes that are no numbers: {numbers}")
    return numbers
