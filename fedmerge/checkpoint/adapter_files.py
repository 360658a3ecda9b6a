"""LoRA adapters: folders of a configuration and its factors, as peft saves them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from fedmerge.checkpoint.files import damaged
from fedmerge.decoding import decode_json, read_text, shortened
from fedmerge.errors import ArchitectureError, CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_MODEL, "adapter_model.bin")  # the best first
_IN_MODEL = "base_model.model."  # in front of a module's name, in peft's files
_PLAIN = re.compile(r"\^?[\w.-]+")  # a pattern that means a name's end, or a whole name
_NO_PRODUCT = {  # options with which an update is no plain product of two factors
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "replicated layers",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow routing",
}
_CHANGE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")  # ways to begin that do


class AdapterConfig(Struct, frozen=True):
    """What is needed of a configuration; everything else in it is left alone."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None  # a module's name or its end → rank
    alpha_pattern: dict[str, float] | None = None
    fan_in_fan_out: bool = False
    bias: str = "none"
    lora_bias: bool = False
    lora_dropout: float = 0.0
    init_lora_weights: bool | str | None = True
    modules_to_save: list[str] | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    inference_mode: bool = True

    def rank(self, module: str) -> int:
        """Return the rank of a module's update."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """Return what the product of a module's factors is multiplied by: α/r, or α/√r."""
        rank = self.rank(module)
        alpha = float(_by_pattern(self.alpha_pattern, module, self.lora_alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def module_of(name: str) -> str:
    """Return a module's name in the model, from that in an adapter's file."""
    return name.removeprefix(_IN_MODEL)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the configuration of a LoRA adapter; refuse what is another kind of adapter."""
    path = folder / ADAPTER_CONFIG

    def fail(reason: str) -> CheckpointError:
        return damaged(path, f"no readable configuration of an adapter: {reason}")

    text = read_text(path, fail=fail)
    _check_kind(decode_json(text, dict[str, Any], fail=fail), path)
    config = decode_json(text, AdapterConfig, fail=fail)
    patterns = (config.rank_pattern or {}, config.alpha_pattern or {})
    for pattern in (key for keys in patterns for key in keys):
        if not _PLAIN.fullmatch(_unescaped(pattern)):
            raise ArchitectureError(
                f"{path}: the pattern {shortened(pattern)!r} is a regular expression, which is not "
                "followed in files of others",
                "write the modules' names into rank_pattern and alpha_pattern",
            )
    ranks, alphas = [config.r], [config.lora_alpha]
    ranks += (config.rank_pattern or {}).values()
    alphas += (config.alpha_pattern or {}).values()
    if min(ranks) < 1 or not all(map(math.isfinite, alphas)):
        raise fail("a rank below 1, or a lora_alpha that is no number")
    return config


def _check_kind(content: Mapping[str, Any], path: Path) -> None:
    kind = content.get("peft_type")
    if kind != "LORA":
        raise ArchitectureError(
            f"{path}: an adapter of the kind {shortened(str(kind))!r}, expected LORA",
            "only LoRA adapters, whose updates are products of two factors, can be merged",
        )
    for option, name in _NO_PRODUCT.items():
        if content.get(option):
            raise ArchitectureError(
                f"{path}: `{option}` is set ({name}), so its updates are no plain products of two "
                "factors",
                "merge each adapter into its base model (merge_and_unload in peft), then those",
            )
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        raise ArchitectureError(
            f"{path}: it began by changing its base model (init_lora_weights={shortened(start)!r})",
            "save it as a plain adapter (path_initial_model_for_weight_conversion in peft's docs)",
        )


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that means a module."""
    for pattern, value in (patterns or {}).items():
        name = _unescaped(pattern)
        is_whole = name.startswith("^")
        if module == name.removeprefix("^") or (not is_whole and module.endswith(f".{name}")):
            return value
    return default


def _unescaped(pattern: str) -> str:
    return pattern.replace("\\.", ".")


def config_to_json(config: AdapterConfig) -> dict[str, Any]:
    """Return a configuration as peft reads it."""
    return structs.asdict(config)
