"""Layers from the names and shapes of a state dict's tensors, without its model's code."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedmerge.errors import ArchitectureError
from fedmerge.types.clients import TensorInfo

Kind: TypeAlias = Literal["linear", "conv", "batch norm", "norm", "scale", "recurrent"]

MODEL_HINT = (
    "give the model's code with --model file.py:factory, or describe its axes in a plan (--plan)"
)

_RECURRENT_LEAF = re.compile(r"(weight|bias)_(ih|hh|hr)(_l\d+(_reverse)?)?")
_BLOCK_WORD = re.compile(
    r"downsample|shortcut|skip|residual|qkv|in_proj|out_proj|[qkv]_proj|attn|attention"
    r"|self_attn|transformer|deconv|upconv|convt|conv_transpose|up|depthwise|pointwise|dwconv"
    r"|squeeze|excite|excitation|se|fire|inception|branch\w*"
)
_PARAMETRISED_LEAVES = {"weight_g", "weight_v", "weight_orig", "weight_u", "weight_mask"}
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Layer:
    """The tensors under one prefix, and the kind of layer that they make."""

    prefix: str
    kind: Kind
    tensors: Mapping[str, TensorInfo]  # by leaf name

    @property
    def names(self) -> list[str]:
        """The full names of its tensors."""
        return [self.name(leaf) for leaf in self.tensors]

    def name(self, leaf: str) -> str:
        """Return the full name of one of its tensors."""
        return f"{self.prefix}.{leaf}" if self.prefix else leaf

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Return the shape of one of its tensors."""
        return self.tensors[leaf].shape


def group_layers(tensors: Mapping[str, TensorInfo], *, kept: Collection[str] = ()) -> list[Layer]:
    """Return the layers in stored order, or refuse with the first tensor that is not understood.

    A layer that is not understood is passed over if all its tensors are `kept`.
    """
    by_prefix: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf != _COUNTER:
            by_prefix.setdefault(prefix, {})[leaf] = info
    layers = []
    for prefix, leaves in by_prefix.items():
        names = [f"{prefix}.{leaf}" if prefix else leaf for leaf in leaves]
        try:
            _refuse_blocks(names[0])
            layers.append(Layer(prefix, classify(prefix, leaves), leaves))
        except ArchitectureError:
            if not set(names) <= set(kept):
                raise
    return layers


def classify(prefix: str, leaves: Mapping[str, TensorInfo]) -> Kind:
    """Return the kind of layer whose tensors have these leaf names and dimensions."""
    dims = {leaf: len(info.shape) for leaf, info in leaves.items()}
    if dims and all(_RECURRENT_LEAF.fullmatch(leaf) for leaf in dims):
        return "recurrent"
    if {"running_mean", "running_var"} <= dims.keys() <= {
        "weight", "bias", "running_mean", "running_var",
    } and set(dims.values()) == {1}:  # fmt: skip
        return "batch norm"
    if "weight" in dims and dims.keys() <= {"weight", "bias"} and dims.get("bias", 1) == 1:
        return _kind_by_weight(prefix, leaves, dims["weight"])
    raise _unknown(prefix, next(iter(leaves)))


def _kind_by_weight(prefix: str, leaves: Mapping[str, TensorInfo], dimensions: int) -> Kind:
    if dimensions == 1 and leaves["weight"].shape == (1,) and "bias" not in leaves:
        return "scale"
    kinds: dict[int, Kind] = {1: "norm", 2: "linear", 3: "conv", 4: "conv", 5: "conv"}
    if dimensions not in kinds:
        raise _unknown(prefix, "weight")
    return kinds[dimensions]


def _refuse_blocks(name: str) -> None:
    for word in name.split("."):
        if word in _PARAMETRISED_LEAVES or word == "parametrizations":
            raise ArchitectureError(
                f"'{name}' belongs to a parametrised weight, which names alone do not explain",
                "save it again without (torch.nn.utils.parametrize.remove_parametrizations)",
            )
        if _BLOCK_WORD.fullmatch(word.rstrip("0123456789_")) or word.startswith("in_proj"):
            raise ArchitectureError(
                f"'{name}' belongs to a block ('{word}'), so the net is no plain chain of layers",
                MODEL_HINT,
            )


def _unknown(prefix: str, leaf: str) -> ArchitectureError:
    name = f"{prefix}.{leaf}" if prefix else leaf
    return ArchitectureError(
        f"'{name}' belongs to no layer that is understood from names alone",
        f"{MODEL_HINT}; --keep '{name}' takes it from the first client as it is",
    )
