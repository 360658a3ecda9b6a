"""Layers from the names and shapes of a state dict's tensors, without its model's code."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedmerge.errors import ArchitectureError
from fedmerge.graph.names import without_common_parts
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
    # a recurrent net written by hand: input to hidden, hidden to hidden
    r"|(i|in|inp|input|x|h|hid|hidden)(2|_to_)(h|hid|hidden)|(i|in|inp|input|x)(2|_to_)(o|out|output)"
    r"|h2o|w?_?[xih]h"
)
_PARAMETRISED_LEAVES = {"weight_g", "weight_v", "weight_orig", "weight_u", "weight_mask"}
_COUNTER = "num_batches_tracked"
_NET_WORD = re.compile(
    r"actor|critic|policy|value|advantage|pi|vf|qf?|qnet|generator|discriminator|gen|disc"
    r"|netg|netd|teacher|student|target|online|local|eval"
)


@dataclass(frozen=True)
class Layer:
    """The tensors under one prefix, and the kind of layer that they make."""

    prefix: str
    kind: Kind
    tensors: Mapping[str, TensorInfo]  # by leaf name

    @property
    def is_weighted(self) -> bool:
        """Whether it makes new units of old ones, as a linear layer does and a norm does not."""
        return self.kind in ("linear", "conv", "recurrent")

    @property
    def input_width(self) -> int:
        """How many units (or channels) it reads."""
        if self.kind == "recurrent":
            return self.shape(f"weight_ih{recurrent_levels(self)[0][0]}")[1]
        if self.kind in ("linear", "conv"):
            return self.shape("weight")[1]
        return self.output_width

    @property
    def output_width(self) -> int:
        """How many units (or channels) it gives, if it is no embedding."""
        if self.kind == "recurrent":
            ends = recurrent_levels(self)[-1]
            return sum(self.shape(f"weight_hh{end}")[1] for end in ends)
        return self.shape("running_mean" if self.kind == "batch norm" else "weight")[0]

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
    _refuse_several_nets([layer.prefix for layer in layers if not set(layer.names) <= set(kept)])
    return layers


def classify(prefix: str, leaves: Mapping[str, TensorInfo]) -> Kind:
    """Return the kind of layer whose tensors have these leaf names and dimensions."""
    dims = {leaf: len(info.shape) for leaf, info in leaves.items()}
    for leaf, info in leaves.items():
        if 0 in info.shape:
            raise ArchitectureError(
                f"'{prefix}.{leaf}' has an axis of size 0 {info.shape}, so it holds no numbers",
                "check how the file was saved",
            )
    if dims and all(_RECURRENT_LEAF.fullmatch(leaf) for leaf in dims):
        _check_recurrent(prefix, dims)
        return "recurrent"
    if {"running_mean", "running_var"} <= dims.keys() <= {
        "weight", "bias", "running_mean", "running_var",
    } and set(dims.values()) == {1}:  # fmt: skip
        return "batch norm"
    if "weight" in dims and dims.keys() <= {"weight", "bias"} and dims.get("bias", 1) == 1:
        return _kind_by_weight(prefix, leaves, dims["weight"])
    raise _unknown(prefix, next(iter(leaves)))


def recurrent_levels(layer: Layer) -> list[list[str]]:
    """Return the endings of each layer's tensor names, one per direction, bottom layer first."""
    ends = [leaf.removeprefix("weight_ih") for leaf in layer.tensors if "weight_ih" in leaf]
    levels: dict[str, list[str]] = {}
    for end in sorted(ends, key=lambda e: (int((re.findall(r"\d+", e) or ["0"])[0]), e)):
        levels.setdefault(end.removesuffix("_reverse"), []).append(end)
    return list(levels.values())


def _check_recurrent(prefix: str, dims: Mapping[str, int]) -> None:
    """Refuse recurrent tensors of wrong dimensions, or without their partner of the same ending."""
    ends = {re.sub(r"^(weight|bias)_..", "", leaf) for leaf in dims}
    needed = {f"{kind}{end}" for end in ends for kind in ("weight_ih", "weight_hh")}
    wrong = [leaf for leaf, count in dims.items() if count != (2 if "weight" in leaf else 1)]
    if wrong:
        raise _unknown(prefix, wrong[0])
    if not needed <= dims.keys():
        missing = min(needed - dims.keys())
        raise ArchitectureError(f"'{prefix or missing}' has no {missing}", MODEL_HINT)


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
        if _BLOCK_WORD.fullmatch(word.rstrip("0123456789_").lower()) or word.startswith("in_proj"):
            raise ArchitectureError(
                f"'{name}' belongs to a block ('{word}'), so the net is no plain chain of layers",
                MODEL_HINT,
            )


def _refuse_several_nets(prefixes: Sequence[str]) -> None:
    """Refuse an actor beside its critic, or a generator beside its discriminator."""
    tops = dict.fromkeys(name.split(".")[0] for name in without_common_parts(prefixes))
    found = [top for top in tops if _NET_WORD.fullmatch(_net_word(top))]
    if len(found) > 1:
        raise ArchitectureError(
            f"'{found[0]}' and '{found[1]}' look like two nets in one file, which are no chain",
            f"merge one net at a time, or {MODEL_HINT}",
        )


def _net_word(top: str) -> str:
    """Return a top-level name without what only says that it is a net: `target_net2`, `q1`."""
    if top in ("G", "D", "g", "d"):
        return {"g": "generator", "d": "discriminator"}[top.lower()]
    word = re.sub(r"[\d_]+$", "", top.lower())
    return re.sub(r"_?(net|network|model|head|stream|func|function|q|critic)$", "", word) or word


def _unknown(prefix: str, leaf: str) -> ArchitectureError:
    name = f"{prefix}.{leaf}" if prefix else leaf
    return ArchitectureError(
        f"'{name}' belongs to no layer that is understood from names alone",
        f"{MODEL_HINT}; --keep '{name}' takes it from the first client as it is",
    )
