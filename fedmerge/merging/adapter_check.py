"""`verify` of a merged LoRA adapter: against its record, and against its clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedmerge.checkpoint import read_record, torch_dtype, values_digest
from fedmerge.decoding import decode_value
from fedmerge.errors import CheckpointError, FedmergeError
from fedmerge.merging.adapter_merge import AdapterMerge, mean_update, merge_opened, source_of
from fedmerge.merging.adapters import (
    Adapter,
    AdapterRecord,
    AdapterSource,
    LayerEntry,
    open_adapters,
)
from fedmerge.merging.options import MatchOptions
from fedmerge.merging.verification import MOST_TWINS, Verification
from fedmerge.values.wording import Progress, silent

_ROUNDINGS = 4  # of a factor's numbers: from where it was stored to where it is written
_SHARES = 1e-6  # by which shares may differ that are computed elsewhere


def verify_adapter(
    path: Path,
    sources: Sequence[str | Path] = (),
    *,
    allow_global: Sequence[str] = (),
    progress: Progress = silent,
) -> Verification:
    """Check a merged adapter's tensors by their hashes, and its updates against the clients' mean.

    Factors of lower rank are not unique, so what is compared is their product: it must be as near
    to the exact mean as any of its rank.
    """
    record = _read(path)
    reading = MatchOptions(allow_global=tuple(allow_global))
    merged = open_adapters([path], reading, least=1)[0]
    differences = list(_tensor_differences(merged, record))
    if sources and not differences:
        try:
            differences += _client_differences(merged, record, sources, reading, progress)
        except FedmergeError as error:
            differences.append(f"the clients do not fit the record: {error.problem}")
    return Verification(
        tensors=len(record.tensors),
        recomputed=len(record.sources) if sources and not differences else 0,
        differences=tuple(differences),
        is_adapter=True,
    )


def _read(path: Path) -> AdapterRecord:
    def damaged(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{path.name}: its merge record is damaged ({reason})", "merge again from the clients"
        )

    return decode_value(read_record(path), AdapterRecord, fail=damaged)


def _tensor_differences(merged: Adapter, record: AdapterRecord) -> Iterator[str]:
    for name in record.tensors.keys() - merged.names.keys():
        yield f"tensor '{name}' of the record is not in the file"
    for name, own in merged.names.items():
        if name not in record.tensors:
            yield f"tensor '{name}' of the file is not in the record"
        elif merged.checkpoint.tensor_digest(own) != record.tensors[name]:
            yield f"tensor '{name}' differs from its recorded SHA-256"


def _client_differences(
    merged: Adapter,
    record: AdapterRecord,
    sources: Sequence[str | Path],
    reading: MatchOptions,
    progress: Progress,
) -> list[str]:
    given = open_adapters(list(sources), reading, least=1)
    if len(record.sources) > MOST_TWINS * len(given):
        return [f"the record has {len(record.sources)} clients, given are {len(given)} adapters"]
    found = {_hashes(source_of(adapter, 1.0)): adapter for adapter in given}
    missing = [source.name for source in record.sources if _hashes(source) not in found]
    odd = set(found) - set(map(_hashes, record.sources))
    if missing:
        return [f"client {missing[0]} is not among the given adapters"]
    if odd:
        return [f"{found[min(odd)].name} is none of the recorded clients"]
    clients = [found[_hashes(source)].renamed(source.name) for source in record.sources]
    options = MatchOptions(
        max_growth=record.max_growth,
        dtype=record.dtype,
        client_weight={source.name: source.weight for source in record.sources},
    )
    again = merge_opened(clients, options, progress)
    return [*_layer_differences(merged, record, again), *_whole_differences(record, again)]


def _hashes(source: AdapterSource) -> tuple[str, str]:
    return source.sha256, source.config_sha256


def _layer_differences(
    merged: Adapter, record: AdapterRecord, again: AdapterMerge
) -> Iterator[str]:
    if not record.layers.keys() == again.layers.keys() == merged.layers.keys():
        yield "the recorded modules are not those of the clients and of the file"
        return
    for module, expected in again.layers.items():
        found = record.layers[module]
        if (found.rank, found.client_ranks) != (expected.rank, expected.client_ranks):
            yield f"module '{module}' has another rank than its clients and the options give"
        elif abs(found.kept - expected.kept) > _SHARES:
            yield f"module '{module}' keeps {expected.kept:.4f} of its update, not {found.kept:.4f}"
        elif not _is_nearest(merged, module, again, expected):
            yield f"module '{module}' is not the mean of its clients' updates"


def _is_nearest(merged: Adapter, module: str, again: AdapterMerge, entry: LayerEntry) -> bool:
    """Return whether a product is as near to the mean as its rank allows, but for rounding."""
    product = merged.product(module)
    mean = mean_update(again.adapters, module, again.weights)
    eps = torch.finfo(torch_dtype(merged.info(merged.layers[module].b).dtype)).eps
    rounded = _ROUNDINGS * eps * float(product.a.norm() * product.b.norm())
    lost = max(0.0, 1 - entry.kept) * entry.energy
    allowed = math.sqrt(lost) + rounded + _SHARES * math.sqrt(entry.energy)
    return math.sqrt(product.distance(mean)) <= allowed


def _whole_differences(record: AdapterRecord, again: AdapterMerge) -> Iterator[str]:
    infos: Mapping[str, Any] = again.tensors
    for name in again.wholes:
        if values_digest(again.values(name), infos[name].dtype) != record.tensors.get(name):
            yield f"tensor '{name}' is not the mean of its clients'"
