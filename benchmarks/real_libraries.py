"""Models of Hugging Face, torchvision and timm, randomly initialised: nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Shapes = tuple[tuple[int, ...], ...]

TOKENS = 97  # words of the small vocabularies


@dataclass(frozen=True)
class Real:
    """A model that people have: how to build it, and what it is fed."""

    build: Callable[[], nn.Module]
    shapes: Shapes
    package: str = ""  # what must be installed
    dtypes: tuple[str, ...] = ()  # of the first inputs; the others are float32
    state: tuple[tuple[int, int], ...] = ()


class ByName(nn.Module):
    """A Hugging Face model fed by keyword that gives one tensor of its result.

    What it also returns (caches, hidden states) would count as outputs and pin their units.
    """

    def __init__(self, model: nn.Module, *names: str, result: str | None = None) -> None:
        super().__init__()
        self.net, self.names, self.result = model, names, result

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        outputs = self.net(**given)
        found: Tensor = outputs[0] if self.result is None else outputs[self.result]
        return found


_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": TOKENS, "max_position_embeddings": 40,
}  # fmt: skip
_GROUPED: dict[str, Any] = {
    **_SMALL,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def _hugging_face(
    name: str, config: str, shapes: Shapes, *, inputs: tuple[str, ...] = ("input_ids",),
    dtypes: tuple[str, ...] = ("long", "long"), result: str | None = None, **settings: Any,
) -> Real:  # fmt: skip
    def build() -> nn.Module:
        library = import_module("transformers")
        made = getattr(library, config)(**settings)
        return ByName(getattr(library, name)(made), *inputs, result=result)

    return Real(build, shapes, "transformers", dtypes)


_TEXT = ((2, 12),)
_MASKED = ((2, 12), (2, 12))
_IMAGE = ((2, 3, 32, 32),)
_PIXELS: dict[str, Any] = {"inputs": ("pixel_values",), "dtypes": ()}

HUGGING_FACE: Mapping[str, Real] = {
    "BERT": _hugging_face(
        "BertForSequenceClassification", "BertConfig", _MASKED,
        inputs=("input_ids", "attention_mask"), **_SMALL,
    ),
    "BERT, masked words": _hugging_face("BertForMaskedLM", "BertConfig", _TEXT, **_SMALL),
    "RoBERTa": _hugging_face("RobertaForSequenceClassification", "RobertaConfig", _TEXT, **_SMALL),
    "DistilBERT": _hugging_face(
        "DistilBertForSequenceClassification", "DistilBertConfig", _TEXT,
        dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=TOKENS,
    ),
    "ALBERT": _hugging_face(
        "AlbertForSequenceClassification", "AlbertConfig", _TEXT, embedding_size=16, **_SMALL
    ),
    "ELECTRA": _hugging_face(
        "ElectraForSequenceClassification", "ElectraConfig", _TEXT, embedding_size=16, **_SMALL
    ),
    "DeBERTa-v2": _hugging_face(
        "DebertaV2ForSequenceClassification", "DebertaV2Config", _TEXT,
        relative_attention=True, pos_att_type=["p2c", "c2p"], **_SMALL,
    ),
    "GPT-2": _hugging_face(
        "GPT2LMHeadModel", "GPT2Config", _TEXT,
        n_embd=32, n_layer=2, n_head=4, vocab_size=TOKENS, n_positions=40, use_cache=False,
    ),
    "GPT-NeoX": _hugging_face(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT, use_cache=False, **_SMALL
    ),
    "BLOOM": _hugging_face(
        "BloomForCausalLM", "BloomConfig", _TEXT,
        hidden_size=32, n_layer=2, n_head=4, vocab_size=TOKENS, use_cache=False,
    ),
    "OPT": _hugging_face(
        "OPTForCausalLM", "OPTConfig", _TEXT, ffn_dim=48, word_embed_proj_dim=32, use_cache=False,
        **_SMALL,
    ),
    "LLaMA": _hugging_face("LlamaForCausalLM", "LlamaConfig", _TEXT, **_GROUPED),
    "Mistral": _hugging_face("MistralForCausalLM", "MistralConfig", _TEXT, **_GROUPED),
    "Mixtral": _hugging_face(
        "MixtralForCausalLM", "MixtralConfig", _TEXT, num_local_experts=3, **_GROUPED
    ),
    "Qwen2": _hugging_face("Qwen2ForCausalLM", "Qwen2Config", _TEXT, **_GROUPED),
    "Qwen3": _hugging_face("Qwen3ForCausalLM", "Qwen3Config", _TEXT, head_dim=8, **_GROUPED),
    "Gemma": _hugging_face("GemmaForCausalLM", "GemmaConfig", _TEXT, head_dim=8, **_GROUPED),
    "Gemma 2": _hugging_face("Gemma2ForCausalLM", "Gemma2Config", _TEXT, head_dim=8, **_GROUPED),
    "Phi": _hugging_face("PhiForCausalLM", "PhiConfig", _TEXT, use_cache=False, **_SMALL),
    "Falcon": _hugging_face("FalconForCausalLM", "FalconConfig", _TEXT, use_cache=False, **_SMALL),
    "T5": _hugging_face(
        "T5ForConditionalGeneration", "T5Config", _MASKED,
        inputs=("input_ids", "decoder_input_ids"), result="logits",
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=TOKENS, use_cache=False,
    ),
    "BART": _hugging_face(
        "BartForConditionalGeneration", "BartConfig", _MASKED,
        inputs=("input_ids", "decoder_input_ids"), result="logits", d_model=32, vocab_size=TOKENS,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40, use_cache=False,
    ),
    "Mamba": _hugging_face(
        "MambaForCausalLM", "MambaConfig", _TEXT,
        hidden_size=32, num_hidden_layers=2, vocab_size=TOKENS, state_size=4, use_cache=False,
    ),
    "RWKV": _hugging_face(
        "RwkvForCausalLM", "RwkvConfig", _TEXT,
        hidden_size=32, num_hidden_layers=2, vocab_size=TOKENS, use_cache=False,
    ),
    "Whisper": _hugging_face(
        "WhisperForConditionalGeneration", "WhisperConfig", ((2, 8, 40), (2, 6)),
        inputs=("input_features", "decoder_input_ids"), dtypes=("float32", "long"), result="logits",
        d_model=32, vocab_size=TOKENS, num_mel_bins=8, max_source_positions=20,
        max_target_positions=20, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "wav2vec 2.0": _hugging_face(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", ((2, 800),), inputs=("input_values",), dtypes=(),
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        **{**_SMALL, "vocab_size": 30},
    ),
    "CLIP, text": _hugging_face(
        "CLIPTextModelWithProjection", "CLIPTextConfig", _TEXT, projection_dim=16, eos_token_id=2,
        **_SMALL,
    ),
    "CLIP, vision": _hugging_face(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", _IMAGE, projection_dim=16,
        **_PIXELS, **_VISION,
    ),
    "CLIP": _hugging_face(
        "CLIPModel", "CLIPConfig", ((2, 12), (3, 3, 32, 32)),
        inputs=("input_ids", "pixel_values"), dtypes=("long",), result="logits_per_text",
        text_config={**_SMALL, "eos_token_id": 2}, vision_config=dict(_VISION), projection_dim=16,
    ),
    "ViT": _hugging_face("ViTForImageClassification", "ViTConfig", _IMAGE, **_PIXELS, **_VISION),
    "DeiT": _hugging_face("DeiTForImageClassification", "DeiTConfig", _IMAGE, **_PIXELS, **_VISION),
    "BEiT": _hugging_face("BeitForImageClassification", "BeitConfig", _IMAGE, **_PIXELS, **_VISION),
    "DINOv2": _hugging_face(
        "Dinov2ForImageClassification", "Dinov2Config", _IMAGE, **_PIXELS,
        **{**_VISION, "mlp_ratio": 2},
    ),
    "Swin": _hugging_face(
        "SwinForImageClassification", "SwinConfig", _IMAGE, **_PIXELS, image_size=32, patch_size=2,
        embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4,
    ),
    "ConvNeXt": _hugging_face(
        "ConvNextForImageClassification", "ConvNextConfig", ((2, 3, 64, 64),), **_PIXELS,
        hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 2, 1],
    ),
    "ResNet": _hugging_face(
        "ResNetForImageClassification", "ResNetConfig", ((2, 3, 64, 64),), **_PIXELS,
        embedding_size=8, hidden_sizes=[12, 16, 20, 24], depths=[1, 1, 1, 1],
    ),
    "MobileNetV2": _hugging_face(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", ((2, 3, 64, 64),), **_PIXELS,
        depth_multiplier=0.35,
    ),
    "SegFormer": _hugging_face(
        "SegformerForSemanticSegmentation", "SegformerConfig", ((2, 3, 64, 64),), **_PIXELS,
        hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4], depths=[1, 1, 1, 1],
        decoder_hidden_size=16,
    ),
}  # fmt: skip


def _torchvision(name: str, side: int = 64, **settings: Any) -> Real:
    def build() -> nn.Module:
        models = import_module("torchvision.models")
        made: nn.Module = models.get_model(name, weights=None, **settings)
        return made

    return Real(build, ((2, 3, side, side),), "torchvision")


_NO_BACKBONE: dict[str, Any] = {"weights_backbone": None, "num_classes": 5}
_QUICK: dict[str, Any] = {
    "num_classes": 10,
    "init_weights": False,
}  # else it draws from SciPy for a minute


def _small(module: str, kind: str, *arguments: Any, side: int = 32, **settings: Any) -> Real:
    """Return a smaller net of torchvision's own classes; names of arguments are looked up there."""

    def build() -> nn.Module:
        code = import_module(f"torchvision.models.{module}")
        given = [a(code) if callable(a) else a for a in arguments]
        made: nn.Module = getattr(code, kind)(*given, num_classes=10, **settings)
        return made

    return Real(build, ((2, 3, side, side),), "torchvision")


def _regnet_blocks(code: Any) -> Any:
    return code.BlockParams.from_init_params(
        depth=4, w_0=16, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25
    )


def _convnext_blocks(code: Any) -> Any:
    return [code.CNBlockConfig(8, 16, 1), code.CNBlockConfig(16, None, 2)]


def _bottleneck(code: Any) -> Any:
    return code.Bottleneck


TORCHVISION: Mapping[str, Real] = {
    **{
        name: _torchvision(name, num_classes=10)
        for name in (
            "resnet18", "resnet50", "densenet121", "mobilenet_v2", "mobilenet_v3_small",
            "efficientnet_b0", "shufflenet_v2_x1_0", "squeezenet1_1", "mnasnet0_5", "vgg11_bn",
        )
    },
    "resnext, small": _small(
        "resnet", "ResNet", _bottleneck, [1, 1, 1, 1], groups=4, width_per_group=8
    ),
    "regnet, small": _small("regnet", "RegNet", _regnet_blocks),
    "convnext, small": _small("convnext", "ConvNeXt", _convnext_blocks),
    "vit, small": _small("vision_transformer", "VisionTransformer", 32, 8, 2, 4, 32, 48),
    "swin, small": _small(
        "swin_transformer", "SwinTransformer", [2, 2], 8, [2, 2], [2, 4], [4, 4],
    ),
    "swin v2, small": _small(
        "swin_transformer", "SwinTransformer", [2, 2], 8, [2, 2], [2, 4], [4, 4],
        block=lambda *a, **k: import_module(
            "torchvision.models.swin_transformer"
        ).SwinTransformerBlockV2(*a, **k),
    ),
    "maxvit, small": _small("maxvit", "MaxVit", (32, 32), 8, 2, [8, 16], [1, 1], 4, 0.0),
    "googlenet": _torchvision("googlenet", **_QUICK),
    "inception_v3": _torchvision("inception_v3", side=96, **_QUICK),
    "lraspp_mobilenet_v3_large": _torchvision("lraspp_mobilenet_v3_large", **_NO_BACKBONE),
    "fasterrcnn_mobilenet_v3_large_320_fpn": _torchvision(
        "fasterrcnn_mobilenet_v3_large_320_fpn", **_NO_BACKBONE
    ),
}  # fmt: skip


def _timm(name: str, side: int = 64, **settings: Any) -> Real:
    def build() -> nn.Module:
        made: nn.Module = import_module("timm").create_model(
            name, pretrained=False, num_classes=10, **settings
        )
        return made

    return Real(build, ((2, 3, side, side),), "timm")


TIMM: Mapping[str, Real] = {
    name: _timm(name)
    for name in (
        "resnet10t", "efficientnet_lite0", "mobilenetv4_conv_small_035", "lcnet_035",
        "ghostnet_050", "mobileone_s0", "convnextv2_atto", "edgenext_xx_small", "skresnet18",
        "regnety_002", "mobilevit_xxs",
    )
} | {
    "vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=64, depth=2),
    "cait_xxs24_224": _timm("cait_xxs24_224", img_size=64, depth=2),
    "xcit_nano_12_p16_224": _timm("xcit_nano_12_p16_224", depth=2),
    "mixer_s32_224": _timm("mixer_s32_224", img_size=64),
    "levit_128s": _timm("levit_128s", side=224),
}  # fmt: skip


def drawn_inputs(real: Real, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return random inputs: tokens of the small vocabulary where the model reads whole numbers."""
    generator = torch.Generator().manual_seed(7)
    inputs = []
    for position, shape in enumerate(real.shapes):
        if position < len(real.dtypes) and real.dtypes[position] == "long":
            inputs.append(torch.randint(1, TOKENS, shape, generator=generator))
        else:
            inputs.append(torch.randn(shape, generator=generator).to(dtype))
    return tuple(inputs)
