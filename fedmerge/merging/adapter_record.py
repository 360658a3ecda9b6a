"""The record of merged LoRA adapters, and the check of a merged adapter against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from fedmerge.decoding import Count, Digest, Name, Number, Share

Rank = Annotated[int, Meta(ge=0, le=2**31)]


class AdapterSource(Struct, frozen=True):
    """One client: its folder's name, the hashes of its two files, and how much it counts."""

    name: Name
    file: str
    sha256: Digest
    config_sha256: Digest
    size: Count
    weight: Annotated[float, Meta(gt=0, le=1e100)]


class LayerEntry(Struct, frozen=True):
    """What became of one module's updates."""

    rank: Rank
    client_ranks: tuple[Rank, ...]  # 0: that client has no update of it
    kept: Share  # of the mean update's energy
    energy: Number  # squared Frobenius norm of the mean update


class AdapterRecord(Struct, frozen=True):
    """A whole record."""

    fedmerge: str
    max_growth: float | Literal["none"] | None
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None
    sources: Annotated[tuple[AdapterSource, ...], Meta(min_length=1)]
    layers: Mapping[str, LayerEntry]
    kept: Share
    warnings: tuple[str, ...]
    tensors: Mapping[str, Digest]
    kind: Literal["adapter"] = "adapter"
    schema: Literal[1] = 1
    format: Literal[1] = 1


def is_adapter_record(value: Mapping[str, Any]) -> bool:
    """Return whether a record is of merged adapters."""
    return value.get("kind") == "adapter"
