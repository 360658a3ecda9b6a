"""Small state dicts and files made of them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

State = dict[str, torch.Tensor]


def state(seed: int = 0) -> State:
    """A linear layer, a norm with an integer buffer, and a bias."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "fc1.weight": torch.randn(4, 3, generator=rng),
        "fc1.bias": torch.randn(4, generator=rng),
        "bn.running_mean": torch.randn(4, generator=rng),
        "bn.num_batches_tracked": torch.tensor(7),
        "fc2.weight": torch.randn(2, 4, generator=rng),
    }


def prefixed(tensors: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def save_zip(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


def save_legacy(content: object, path: Path) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def save_safetensors(content: State, path: Path) -> Path:
    save_file(content, path)
    return path


def save_sharded(tensors: State, folder: Path, save: Callable[[State, Path], Path]) -> Path:
    """Spread a state dict over two shards and return the index."""
    suffix = ".safetensors" if save is save_safetensors else ".bin"
    places: dict[str, str] = {}
    for number in range(2):
        part = dict(list(tensors.items())[number::2])
        shard = f"model-{number + 1:05}-of-00002{suffix}"
        save(part, folder / shard)
        places |= dict.fromkeys(part, shard)
    return write_index(folder, {name: places[name] for name in tensors}, suffix)


def write_index(folder: Path, places: Mapping[str, object], suffix: str = ".safetensors") -> Path:
    index = folder / f"model{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index
