"""The mean of LoRA adapters' updates, exactly or at a wanted rank, written as an adapter again."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from msgspec import structs, to_builtins
from torch import Tensor

from fedmerge import __version__
from fedmerge.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    OUTPUT_SUFFIXES,
    Values,
    check_folder,
    config_to_json,
    new_folder,
    torch_dtype,
    write_model,
)
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging.adapters import (
    Adapter,
    AdapterRecord,
    AdapterSource,
    LayerEntry,
    Product,
    combined,
    truncated,
)
from fedmerge.merging.averages import client_weights, mean_pieces
from fedmerge.merging.client_sources import RenamedClient
from fedmerge.merging.options import MatchOptions, option_name
from fedmerge.values.clients import TensorInfo
from fedmerge.values.wording import Progress, listed, percent, silent

MOST_ENERGY = 1e100  # squared Frobenius norm of a module's mean update
_TAKEN = ("method", "max_growth", "client_weight", "dtype", "seed", "allow_global")


@dataclass(frozen=True)
class AdapterMerge:
    """Adapters merged: the mean of their updates, ready to be written as an adapter."""

    adapters: Sequence[Adapter]
    options: MatchOptions
    weights: tuple[float, ...]
    layers: Mapping[str, LayerEntry]  # by the module's name
    factors: Mapping[str, Tensor]  # by their written names, as they are written
    warnings: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def client_ranks(self) -> dict[str, int]:
        """Every client's largest rank."""
        return {adapter.name: max(map(adapter.rank, adapter.layers)) for adapter in self.adapters}

    @property
    def kept(self) -> float:
        """The share of the mean update that is kept: of its squared Frobenius norm, all modules."""
        whole = sum(layer.energy for layer in self.layers.values())
        kept = sum(layer.kept * layer.energy for layer in self.layers.values())
        return kept / whole if whole > 0 else 1.0

    @property
    def parameters(self) -> int:
        """How many floating-point numbers the merged adapter holds."""
        return sum(info.size for info in self.tensors.values() if info.is_float)

    def summary(self) -> dict[str, Any]:
        """Return what a script wants to know of the merge."""
        return {
            "adapter": True,
            "clients": [adapter.name for adapter in self.adapters],
            "rank": self.rank,
            "client_ranks": self.client_ranks,
            "kept": self.kept,
            "modules": len(self.layers),
            "averaged": len(self.wholes),
            "parameters": self.parameters,
            "warnings": list(self.warnings),
        }

    def __repr__(self) -> str:
        """Return the merge in one line."""
        return (
            f"<{type(self).__name__} of {len(self.adapters)} adapters "
            f"({listed(list(self.client_ranks), 8)}): rank {self.rank}, {percent(self.kept)} kept>"
        )

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor that is written."""
        found = {
            name: TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.factors.items()
        }
        first = self.adapters[0]
        return found | {name: _written(first.info(name), self.options) for name in self.wholes}

    @property
    def wholes(self) -> list[str]:
        """The tensors that were trained whole, and are averaged."""
        return self.adapters[0].others

    def values(self, name: str) -> Values:
        """Return one tensor for its file: of what was trained whole, the mean."""
        if name in self.factors:
            return [self.factors[name].reshape(-1)]
        first = self.adapters[0]
        info = first.info(name)
        if not info.is_float:
            return first.checkpoint.read(first.names[name])
        clients = [RenamedClient(adapter.checkpoint, adapter.names) for adapter in self.adapters]
        return mean_pieces(name, clients, self.weights, _written(info, self.options).dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the merged adapter's tensors by the names of peft's files."""
        state = {}
        for name, info in self.tensors.items():
            values = self.values(name)
            pieces = (
                values if not hasattr(values, "dtype") else [torch.from_numpy(values).flatten()]
            )
            state[name] = torch.cat(list(pieces)).reshape(info.shape)
        return state

    def config(self) -> dict[str, Any]:
        """Return the merged adapter's configuration: scaling 1, every module at its rank."""
        ranks = {module: layer.rank for module, layer in self.layers.items()}
        usual = Counter(ranks.values()).most_common(1)[0][0]
        pattern = {f"^{re.escape(m)}": rank for m, rank in ranks.items() if rank != usual}
        config = structs.replace(
            self.adapters[0].config,
            r=usual,
            lora_alpha=usual,
            use_rslora=False,
            rank_pattern=pattern,
            alpha_pattern=dict(pattern),
            init_lora_weights=True,
            inference_mode=True,
        )
        if not self._is_chosen_alike:
            config = structs.replace(
                config,
                target_modules=sorted(ranks),
                exclude_modules=None,
                layers_to_transform=None,
                layers_pattern=None,
            )
        return config_to_json(config)

    @property
    def _is_chosen_alike(self) -> bool:
        """Whether one choice of modules means those of all clients."""
        choices = [
            (config.target_modules, config.exclude_modules, config.layers_to_transform)
            for config in (adapter.config for adapter in self.adapters)
        ]
        first = self.adapters[0]
        modules = all(adapter.layers.keys() == first.layers.keys() for adapter in self.adapters)
        patterns = {str(adapter.config.layers_pattern) for adapter in self.adapters}
        return modules and len(patterns) == 1 and all(choice == choices[0] for choice in choices)

    def write(self, path: str | Path, *, force: bool = False, progress: Progress = silent) -> Path:
        """Write a folder that peft loads, with the merge record in its tensors' file."""
        infos, started = self.tensors, itertools.count()

        def values(name: str) -> Values:
            progress("writing", next(started), len(infos))
            return self.values(name)

        with new_folder(path, force=force) as folder:
            write_model(folder / ADAPTER_MODEL, infos, values, record=self.record)
            config = json.dumps(self.config(), indent=2, ensure_ascii=False) + "\n"
            (folder / ADAPTER_CONFIG).write_text(config, encoding="utf-8")
            (folder / "README.md").write_text(self._card(), encoding="utf-8")
        return Path(path)

    def record(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Return the merge record, given the SHA-256 of every written tensor."""
        record: dict[str, Any] = to_builtins(
            AdapterRecord(
                fedmerge=__version__,
                max_growth=self.options.max_growth,
                dtype=cast(Any, self.options.dtype),
                sources=tuple(map(source_of, self.adapters, self.weights)),
                layers=self.layers,
                kept=self.kept,
                warnings=self.warnings,
                tensors=dict(digests),
            )
        )
        return record

    def _card(self) -> str:
        """Return what people read of the folder first."""
        base = self.adapters[0].config.base_model_name_or_path
        head = ["library_name: peft", *([f"base_model: {json.dumps(base)}"] if base else [])]
        names = ", ".join(f"{name} (rank {rank})" for name, rank in self.client_ranks.items())
        lines = [
            "---",
            *head,
            "---",
            "",
            "# Merged adapter",
            "",
            f"The mean of the updates of {len(self.adapters)} LoRA adapters: {names}.",
            f"Its rank is {self.rank}; it keeps {percent(self.kept)} of the mean update (squared "
            "Frobenius norm).",
            "",
            f"Made by fedmerge {__version__}; `fedmerge verify` checks it against its clients.",
        ]
        return "\n".join(lines) + "\n"


def _written(info: TensorInfo, options: MatchOptions) -> TensorInfo:
    dtype = options.dtype if options.dtype and info.is_float else info.dtype
    return TensorInfo(info.shape, dtype)


def source_of(adapter: Adapter, weight: float) -> AdapterSource:
    """Return what the record says of one client."""
    path = adapter.checkpoint.path
    assert path is not None
    config = (path / ADAPTER_CONFIG).read_bytes()
    return AdapterSource(
        name=adapter.name,
        file=path.resolve().name,
        sha256=adapter.checkpoint.sha256(),
        config_sha256=hashlib.sha256(config).hexdigest(),
        size=adapter.checkpoint.size,
        weight=weight,
    )


def check_output(path: str | Path, adapters: Sequence[Path], *, force: bool) -> None:
    """Refuse an output that is no folder, or that must not be written, before any work."""
    path = Path(path)
    if path.suffix.lower() in OUTPUT_SUFFIXES:
        raise UsageError(
            f"{path}: adapters are written as a folder, which peft loads",
            f"name one, e.g. {path.with_suffix('')}",
        )
    check_folder(path, inputs=adapters, force=force)


def check_options(options: MatchOptions) -> None:
    """Refuse options that mean nothing for adapters."""
    plain = MatchOptions()
    for option in fields(MatchOptions):
        is_set = getattr(options, option.name) != getattr(plain, option.name)
        if is_set and option.name not in _TAKEN:
            raise UsageError(
                f"{option_name(option.name)} means nothing for LoRA adapters",
                "their updates are averaged; `max_growth` and `client_weight` can be chosen",
            )
    if options.method in _NO_MEAN:
        raise UsageError(
            f"`method={options.method}`: LoRA adapters cannot be {_NO_MEAN[options.method]}",
            "without `max_growth` their mean update is kept exactly",
        )


_NO_MEAN = {"ensemble": "set side by side", "ot": "transported"}


def merge_opened(
    adapters: Sequence[Adapter], options: MatchOptions, progress: Progress = silent
) -> AdapterMerge:
    """Return the mean of updates: exactly at the sum of ranks, or the nearest one within a rank.

    With `max_growth` g, a module's rank is at most g times that of the client with the largest. A
    client without an update of a module counts with an update of zero.
    """
    weights = client_weights(options.client_weight, [adapter.checkpoint for adapter in adapters])
    modules = list(dict.fromkeys(module for adapter in adapters for module in adapter.layers))
    layers: dict[str, LayerEntry] = {}
    factors: dict[str, Tensor] = {}
    for number, module in enumerate(modules):
        progress("merging", number, len(modules))
        product, layers[module] = merged_update(adapters, module, weights, options)
        factors |= _factors(adapters, module, product, weights, options)
    progress("merging", len(modules), len(modules))
    return AdapterMerge(adapters, options, weights, layers, factors, tuple(_doubts(adapters)))


def mean_update(adapters: Sequence[Adapter], module: str, weights: Sequence[float]) -> Product:
    """Return the mean of one module's updates, exactly."""
    whole = sum(weights)
    owners = [(a, w / whole) for a, w in zip(adapters, weights, strict=True) if module in a.layers]
    return combined([adapter.product(module) for adapter, _ in owners], [s for _, s in owners])


def merged_update(
    adapters: Sequence[Adapter], module: str, weights: Sequence[float], options: MatchOptions
) -> tuple[Product, LayerEntry]:
    """Return one module's mean update within the wanted rank, and what became of it."""
    mean = mean_update(adapters, module, weights)
    if not mean.energy <= MOST_ENERGY:
        raise ArchitectureError(
            f"the updates of '{module}' are too large to be averaged",
            "look for a client whose training diverged, or that has a huge lora_alpha",
        )
    ranks = tuple(adapter.rank(module) for adapter in adapters)
    limit = mean.rank
    if options.max_growth not in (None, "none"):
        limit = int(float(options.max_growth) * max(ranks))
    product, kept = (mean, 1.0) if limit >= mean.rank else truncated(mean, limit)
    return product, LayerEntry(product.rank, ranks, min(1.0, kept), mean.energy)


def _factors(
    adapters: Sequence[Adapter],
    module: str,
    product: Product,
    weights: Sequence[float],
    options: MatchOptions,
) -> dict[str, Tensor]:
    """Return the tensors of one module by their written names, as they are written."""
    owner = next(adapter for adapter in adapters if module in adapter.layers)
    layer = owner.layers[module]
    a, b = owner.info(layer.a), owner.info(layer.b)
    found = {
        layer.a: (product.a.reshape(product.rank, *a.shape[1:]), a),
        layer.b: (product.b.reshape(b.shape[0], product.rank, *b.shape[2:]), b),
    }
    if layer.bias in owner.names:
        found[layer.bias] = (_mean_bias(adapters, module, weights), owner.info(layer.bias))
    return {
        name: tensor.to(torch_dtype(_written(info, options).dtype)).contiguous()
        for name, (tensor, info) in found.items()
    }


def _mean_bias(adapters: Sequence[Adapter], module: str, weights: Sequence[float]) -> Tensor:
    """Return the mean of the second factors' biases, which are scaled as the products are."""
    whole = sum(weights)
    parts = [
        weight / whole * adapter.config.scaling(module) * adapter.tensor(layer.bias)
        for weight, adapter in zip(weights, adapters, strict=True)
        if (layer := adapter.layers.get(module)) is not None
    ]
    return torch.stack(parts).sum(0)


def _doubts(adapters: Sequence[Adapter]) -> list[str]:
    """Say where clients differ that should be of one kind."""
    doubts = []
    for option, what in (("base_model_name_or_path", "base model"), ("task_type", "task")):
        values = {str(getattr(adapter.config, option)) for adapter in adapters}
        if len(values) > 1:
            doubts.append(f"the adapters name different {what}s: {', '.join(sorted(values))}")
    first = adapters[0].layers.keys()
    others = [adapter.name for adapter in adapters[1:] if adapter.layers.keys() != first]
    if others:
        doubts.append(
            f"{listed(others, 8)} and {adapters[0].name} update different modules; where one has "
            "no update, it counts as zero"
        )
    return doubts
