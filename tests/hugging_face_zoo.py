"""Small models of the families that people have on the Hub, made from configurations alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from fedmerge.architecture import plan_checked, solve_widths
from fedmerge.architecture.from_code import float_tensors, permuted
from fedmerge.architecture.from_library import ConfiguredModel, library_model

TOKENS = 41
HEADS = "num_attention_heads and num_key_value_heads"


@dataclass(frozen=True)
class Family:
    """A family: its class, its settings, and the fields of its config.json that may grow."""

    model: str
    config: str
    settings: Mapping[str, Any]
    grows: tuple[str, ...]

    @property
    def says(self) -> set[str]:
        """The fields that grow with the release of transformers that is installed."""
        return {name for name in self.grows if name != HEADS or _takes_any_heads(self)}


_TEXT: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "vocab_size": TOKENS, "max_position_embeddings": 32,
}  # fmt: skip
_DECODER: dict[str, Any] = {
    **_TEXT, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_SEQUENCES: dict[str, Any] = {
    "d_model": 16, "vocab_size": TOKENS, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 28, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "BERT": Family("BertForMaskedLM", "BertConfig", _TEXT, ("intermediate_size",)),
    "RoBERTa": Family(
        "RobertaForSequenceClassification", "RobertaConfig", _TEXT, ("intermediate_size",)
    ),
    "DistilBERT": Family(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "vocab_size": TOKENS},
        ("hidden_dim",),
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "n_positions": 32},
        ("n_inner",),
    ),
    "Llama, tied": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_DECODER, "tie_word_embeddings": True},
        ("intermediate_size", HEADS),
    ),
    "Llama, untied": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_DECODER, "tie_word_embeddings": False},
        ("intermediate_size", HEADS),
    ),
    "Qwen 2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        _DECODER,
        ("intermediate_size", HEADS),
    ),
    "Qwen 3": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        _DECODER,
        ("intermediate_size", HEADS),
    ),
    "Mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        _DECODER,
        ("intermediate_size", HEADS),
    ),
    "Gemma": Family(
        "GemmaForCausalLM",
        "GemmaConfig",
        _DECODER,
        ("intermediate_size", HEADS),
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4}
        | {"vocab_size": TOKENS, "decoder_start_token_id": 0},
        ("d_ff",),
    ),
    "BART": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {**_SEQUENCES, "max_position_embeddings": 32},
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_SEQUENCES, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"intermediate_size": 24, "image_size": 16, "patch_size": 8, "num_labels": 5},
        ("intermediate_size",),
    ),
    "ConvNeXt": Family(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [6, 8, 10, 12], "depths": [1, 1, 1, 1], "image_size": 64}
        | {"num_labels": 5},
        (),
    ),
    "ResNet": Family(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 6, "hidden_sizes": [8, 10], "depths": [1, 2], "layer_type": "basic"}
        | {"num_labels": 5},
        ("hidden_sizes.0", "hidden_sizes.1"),  # a stem as wide as a stage has no shortcut
    ),
    "wav2vec 2.0": Family(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            "conv_dim": (6, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8),
            "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 24, "vocab_size": 20, "pad_token_id": 0,
        },
        ("intermediate_size",),  # its first convolution has a group norm
    ),
}  # fmt: skip


def _takes_any_heads(family: Family) -> bool:
    """Return whether a configuration takes heads that do not divide its hidden size.

    That of a Llama does in transformers 5.0, and refuses them later.
    """
    odd = {**family.settings, "num_attention_heads": 6, "num_key_value_heads": 3}
    try:
        getattr(import_module("transformers"), family.config)(**odd)
    except StrictDataclassError:
        return False
    return True


def saved(family: Family, folder: Path, *, seed: int) -> Path:
    """Save a model of a family at generic weights, as its library does."""
    library: Any = import_module("transformers")
    torch.manual_seed(seed)
    settings = copy.deepcopy(dict(family.settings))
    model = getattr(library, family.model)(getattr(library, family.config)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    _save(model, folder)
    return folder


def _save(model: Any, folder: Path) -> None:
    """Save a model without bars on stderr."""
    import_module("transformers.utils.logging").disable_progress_bar()
    model.save_pretrained(folder)


def shuffled(source: Path, folder: Path, *, seed: int) -> Path:
    """Save a copy of a folder's model in which the units of every group are in another order."""
    model = loaded(source)
    rng = np.random.default_rng(seed)
    plan = plan_checked(configured(source), configured(source).example_inputs(), seed=0, state=())
    tensors = float_tensors(model)[0]
    widths = solve_widths(plan, {n: tuple(t.shape) for n, t in tensors.items()}, source="a")
    moves = {group: rng.permutation(width) for group, width in widths.items()}
    moved: Any = permuted(model, plan, moves, widths)
    _save(moved, folder)
    return folder


def nudged(source: Path, folder: Path, *, seed: int) -> Path:
    """Save a copy of a folder's model whose weights are a little different, as after tuning."""
    model = loaded(source)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    _save(model, folder)
    return folder


def configured(folder: Path) -> ConfiguredModel:
    """Return the model of a folder's config.json as fedmerge builds it, at random weights."""
    model = library_model(f"transformers:{folder}", {})
    assert isinstance(model, ConfiguredModel)
    return model


def loaded(folder: Path) -> Any:
    """Return the model of a folder, loaded by the library alone."""
    library: Any = import_module("transformers")
    names = library.AutoConfig.from_pretrained(folder).architectures
    model = getattr(library, names[0]).from_pretrained(folder)
    return model.eval()


def outputs(folder: Path, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the logits that the library's model in a folder gives."""
    with torch.no_grad():
        found: Tensor = loaded(folder)(**inputs).logits
    return found
