"""LoRA adapters as peft saves them, written without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

State = Mapping[str, Tensor]
MODULES = {"encoder.fc1": (7, 5), "encoder.fc2": (6, 7)}  # outputs, inputs
IN_MODEL = "base_model.model."


def adapter(
    folder: Path,
    seed: int,
    *,
    rank: int = 2,
    ranks: Mapping[str, int] | None = None,
    modules: Mapping[str, tuple[int, int]] = MODULES,
    dtype: torch.dtype = torch.float64,
    more: State | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of random factors, and return its folder."""
    folder.mkdir(parents=True)
    rng = torch.Generator().manual_seed(seed)
    state = dict(more or {})
    for module, (outputs, inputs) in modules.items():
        own = (ranks or {}).get(module, rank)
        a = torch.randn(own, inputs, generator=rng, dtype=torch.float64)
        b = torch.randn(outputs, own, generator=rng, dtype=torch.float64)
        state[f"{IN_MODEL}{module}.lora_A.weight"] = a.to(dtype)
        state[f"{IN_MODEL}{module}.lora_B.weight"] = b.to(dtype)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    content = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "rank_pattern": dict(ranks or {}),
        "target_modules": ["fc1", "fc2"],
        "base_model_name_or_path": "base",
        "auto_mapping": None,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration in a folder."""
    content: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return content


def update(folder: Path, module: str) -> Tensor:
    """Return α/r · B·A of a module by peft's formula, zeros where there is none."""
    config, state = config_of(folder), load_file(folder / "adapter_model.safetensors")
    if f"{IN_MODEL}{module}.lora_A.weight" not in state:
        return torch.zeros(MODULES[module], dtype=torch.float64)
    a = state[f"{IN_MODEL}{module}.lora_A.weight"].double()
    b = state[f"{IN_MODEL}{module}.lora_B.weight"].double()
    patterns = {key.lstrip("^").replace("\\.", "."): v for key, v in config["rank_pattern"].items()}
    alphas = {
        key.lstrip("^").replace("\\.", "."): v
        for key, v in (config.get("alpha_pattern") or {}).items()
    }
    rank, alpha = patterns.get(module, config["r"]), alphas.get(module, config["lora_alpha"])
    assert len(a) == rank
    scaling = float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    return scaling * b @ a
