"""LoRA adapters as clients: opened, their factors paired and multiplied, compared, recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, Struct
from torch import Tensor

from fedmerge.checkpoint import (
    ADAPTER_CONFIG,
    AdapterConfig,
    Checkpoint,
    adapter_folder,
    client_names,
    module_of,
    open_checkpoint,
    read_adapter_config,
)
from fedmerge.decoding import Count, Digest, Name, Number, Share, shortened
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging.client_sources import expand_sources, listed
from fedmerge.merging.options import MatchOptions
from fedmerge.values.clients import TensorInfo

_FACTORS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))
_BIAS = "lora_B.bias"


@dataclass(frozen=True)
class Layer:
    """The names of one module's factors, and of the bias of the second where it has one."""

    a: str
    b: str
    bias: str


@dataclass(frozen=True)
class Adapter:
    """One client: an adapter's tensors by their written names, and how they are scaled."""

    checkpoint: Checkpoint
    config: AdapterConfig
    names: Mapping[str, str]  # as written → as the checkpoint calls it
    layers: Mapping[str, Layer]  # by the module's name in the model

    @property
    def name(self) -> str:
        """The client's name: that of its folder."""
        return self.checkpoint.name

    def renamed(self, name: str) -> Adapter:
        """Return the same adapter under another client's name."""
        return replace(self, checkpoint=self.checkpoint.renamed(name))

    @property
    def others(self) -> list[str]:
        """The tensors that are no factors: layers and biases that were trained whole."""
        factors = {name for layer in self.layers.values() for name in (layer.a, layer.b)}
        factors |= {layer.bias for layer in self.layers.values()}
        return [name for name in self.names if name not in factors]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by its written name, in double precision."""
        return self.checkpoint.read_torch(self.names[name]).double()

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's shape and dtype by its written name."""
        return self.checkpoint.tensors[self.names[name]]

    def rank(self, module: str) -> int:
        """Return the rank of a module's update, 0 where it has none."""
        return self.info(self.layers[module].a).shape[0] if module in self.layers else 0

    def product(self, module: str) -> Product:
        """Return a module's update with its scaling."""
        layer, scaling = self.layers[module], self.config.scaling(module)
        a, b = self.tensor(layer.a), self.tensor(layer.b)
        return Product(scaling * b.reshape(len(b), -1), a.reshape(len(a), -1))


def open_adapters(clients: Any, options: MatchOptions, *, least: int = 2) -> list[Adapter]:
    """Open adapters and check that they fit together."""
    sources, names = listed(clients)
    expanded = expand_sources(sources, least=least)
    paths = [source for source in expanded if isinstance(source, Path)]
    others = [path for path in paths if adapter_folder(path) is None]
    if others or len(paths) < len(expanded):
        what = str(others[0]) if others else "a state dict"
        raise ArchitectureError(
            f"{what}: no LoRA adapter, but others are", "merge adapters with adapters only"
        )
    named = names or client_names(paths)
    if len(named) != len(paths):
        raise UsageError("`clients` has a name for several files, expected one adapter per name")
    adapters = [_open(path, name, options) for path, name in zip(paths, named, strict=True)]
    for number, adapter in enumerate(adapters[1:], start=1):
        _check_alike(adapter, adapters[:number], options.dtype)
    return adapters


def _open(path: Path, name: str, options: MatchOptions) -> Adapter:
    folder = adapter_folder(path)
    assert folder is not None
    config = read_adapter_config(folder)
    checkpoint = open_checkpoint(folder, options.reading, name=name)
    names = {checkpoint.output_name(own): own for own in checkpoint.tensors}
    adapter = Adapter(checkpoint, config, names, _layers(names, name))
    for module, layer in adapter.layers.items():
        _check_factors(adapter, module, layer)
    return adapter


def _layers(names: Mapping[str, str], source: str) -> dict[str, Layer]:
    layers: dict[str, Layer] = {}
    for name in names:
        for a, b in _FACTORS:
            if name.endswith(f".{a}"):
                module = name.removesuffix(f".{a}")
                layers[module_of(module)] = Layer(name, f"{module}.{b}", f"{module}.{_BIAS}")
    known = {name for layer in layers.values() for name in (layer.a, layer.b, layer.bias)}
    odd = [name for name in names if ".lora_" in name and name not in known]
    missing = [layer.b for layer in layers.values() if layer.b not in names]
    if odd or missing or not layers:
        what = (
            f"the tensor '{odd[0]}', which belongs to no pair of factors"
            if odd
            else f"no tensor '{missing[0]}'"
            if missing
            else "no factors (lora_A, lora_B)"
        )
        raise ArchitectureError(f"{source}: has {what}", "save the adapter again with peft")
    return layers


def _check_factors(adapter: Adapter, module: str, layer: Layer) -> None:
    """Refuse factors that make no product, or whose rank is not the configuration's."""
    a, b = adapter.info(layer.a), adapter.info(layer.b)
    rank = adapter.config.rank(module)
    is_product = len(a.shape) > 1 and len(b.shape) > 1 and a.is_float and b.is_float
    if not is_product or b.size != b.shape[0] * b.shape[1] or a.shape[0] != b.shape[1]:
        raise ArchitectureError(
            f"{adapter.name}: '{layer.b}' {b.shape} and '{layer.a}' {a.shape} make no product"
        )
    if a.shape[0] != rank:
        raise ArchitectureError(
            f"{adapter.name}: '{layer.a}' has rank {a.shape[0]}, {ADAPTER_CONFIG} says {rank}",
            "the file belongs to another configuration",
        )


def _check_alike(adapter: Adapter, earlier: Sequence[Adapter], dtype: str | None) -> None:
    """Refuse an adapter that cannot be averaged with those before it."""
    first = earlier[0]
    for option in ("fan_in_fan_out", "bias", "lora_bias"):
        found, expected = getattr(adapter.config, option), getattr(first.config, option)
        if found != expected:
            raise ArchitectureError(
                f"{adapter.name}: `{option}` is {shortened(str(found))}, expected "
                f"{shortened(str(expected))} as in {first.name}"
            )
    for module in adapter.layers:
        other = next((own for own in earlier if module in own.layers), None)
        if other is not None and _kind(adapter, module) != _kind(other, module):
            raise ArchitectureError(
                f"{adapter.name}: the factors of '{module}' are for a layer of another shape than "
                f"in {other.name}, or have a bias alone",
                "adapters must be of one base model",
            )
    _check_wholes(adapter, first)
    found_types, expected_types = _float_types(adapter), _float_types(first)
    if dtype is None and found_types != expected_types:
        raise ArchitectureError(
            f"{adapter.name}: is {' and '.join(found_types)}, {first.name} "
            f"{' and '.join(expected_types)}",
            "say which dtype the result shall have with `dtype`",
        )


def _kind(adapter: Adapter, module: str) -> tuple[object, ...]:
    """Return what is fixed of a module's factors: all but the rank, and what they are called."""
    layer = adapter.layers[module]
    a, b = adapter.info(layer.a).shape, adapter.info(layer.b).shape
    return a[1:], (b[0], *b[2:]), layer.a.rpartition(".")[2], layer.bias in adapter.names


def _check_wholes(adapter: Adapter, first: Adapter) -> None:
    """Refuse layers that were trained whole in one adapter only, or in other shapes."""
    if different := set(adapter.others).symmetric_difference(first.others):
        raise ArchitectureError(
            f"{adapter.name}: '{min(different)}' is not in both it and {first.name}",
            "adapters must train the same layers whole (modules_to_save), and the same biases",
        )
    for name in adapter.others:
        if adapter.info(name).shape != first.info(name).shape:
            raise ArchitectureError(
                f"{adapter.name}: '{name}' has another shape than in {first.name}"
            )


def _float_types(adapter: Adapter) -> list[str]:
    return sorted({info.dtype for info in adapter.checkpoint.tensors.values() if info.is_float})


@dataclass(frozen=True)
class Product:
    """An update B·A of a layer, all in double precision."""

    b: Tensor  # (outputs, rank)
    a: Tensor  # (rank, inputs)

    @property
    def rank(self) -> int:
        """How many columns B has."""
        return self.b.shape[1]

    @property
    def energy(self) -> float:
        """The squared Frobenius norm of B·A: the sum of (BᵀB) ∘ (A·Aᵀ)."""
        return float(((self.b.T @ self.b) * (self.a @ self.a.T)).sum())

    def distance(self, other: Product) -> float:
        """Return the squared Frobenius norm of the difference from another product."""
        return max(0.0, combined([self, other], [1.0, -1.0]).energy)


def combined(products: Sequence[Product], shares: Sequence[float]) -> Product:
    """Return the weighted sum of products, exactly, at the sum of their ranks.

    Σ s_j B_j A_j = [s_1 B_1, s_2 B_2, …] · [A_1; A_2; …]
    """
    b = torch.cat([share * own.b for own, share in zip(products, shares, strict=True)], dim=1)
    return Product(b, torch.cat([own.a for own in products]))


def truncated(product: Product, rank: int) -> tuple[Product, float]:
    """Return the nearest product of at most this rank, and the share of the energy that it keeps.

    With B = Q_B R_B and Aᵀ = Q_A R_A, the singular values of B·A are those of the small matrix
    R_B R_Aᵀ; the largest ones are kept, half of each in either factor.
    """
    q_b, r_b = torch.linalg.qr(product.b)
    q_a, r_a = torch.linalg.qr(product.a.T)
    u, values, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    energies = values.square()
    whole = float(energies.sum())
    kept = float(energies[:rank].sum()) / whole if whole > 0 else 1.0
    roots = values[:rank].sqrt()
    return Product(q_b @ u[:, :rank] * roots, roots[:, None] * (v[:rank] @ q_a.T)), kept


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
