"""Layers, told from tensor names and shapes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, TypeAlias

from fedmerge.errors import ArchitectureError
from fedmerge.values.clients import TensorInfo

_PLACES = {
    0: "in inp input first stem",
    1: "encoder enc embed embedding embeddings emb features feature backbone",
    2: "hidden hid mid middle latent bottleneck",
    4: "decoder dec",
    5: "classifier head out output last final predict prediction predictor logits tag",
}
_WEAK_PLACES = {
    1: "conv convs cnn",
    2: "rnn lstm gru blstm bilstm",
    4: "fc fcs linear lin dense mlp",
}
_PLACE_OF = {word: place for place, words in _PLACES.items() for word in words.split()}
_WEAK_PLACE_OF = {word: place for place, words in _WEAK_PLACES.items() for word in words.split()}
_EMBEDDING_WORDS = frozenset(("embed", "embedding", "embeddings", "emb", "embeds"))
_OUTPUT_WORDS = {word for word, place in {**_PLACE_OF, **_WEAK_PLACE_OF}.items() if place >= 3}
_BLOCK_WORD = re.compile(r"blocks?|res|resblocks?|residuals?|stages?|units?")


def parts(prefix: str) -> list[str]:
    """Return a name's parts between its dots."""
    return prefix.split(".")


def words(part: str) -> list[str]:
    """Return the words of one part of a name in lower case, without numbers.

    >>> words("hidden2tag"), words("fc_out1")
    (['hidden', 'tag'], ['fc', 'out'])
    """
    return [word for word in re.split(r"[_\d]+", part.lower()) if word]


@cache
def numbers(prefix: str) -> tuple[int, ...]:
    """Return the numbers in a name, from left to right."""
    return tuple(map(int, re.findall(r"\d+", prefix)))


@cache
def skeleton(prefix: str) -> str:
    """Return a name with its numbers left open: `layer1.0` and `layer2.0` share one."""
    return re.sub(r"_?\d+", "#", prefix)


def natural_key(prefix: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts names with their numbers as numbers."""
    pieces = re.split(r"(\d+)", prefix)
    return tuple((0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces)


def without_common_parts(prefixes: Sequence[str]) -> list[str]:
    """Return the names without the leading parts that all of them share."""
    split = [parts(prefix) for prefix in prefixes]
    while split and all(len(p) > 1 and p[0] == split[0][0] for p in split):
        split = [p[1:] for p in split]
    return [".".join(p) for p in split]


def place(prefix: str) -> tuple[int, ...]:
    """Return how late in a net the words of a name say it is, one number per part that says so.

    >>> place("encoder.fc1") < place("decoder.fc1"), place("net")
    (True, ())
    """
    found = (_place_of_part(part) for part in parts(prefix))
    return tuple(number for number in found if number is not None)


def _place_of_part(part: str) -> int | None:
    spoken = words(part.rpartition("2")[2] if re.fullmatch(r"[a-z]+2[a-z]+", part) else part)
    for table in (_PLACE_OF, _WEAK_PLACE_OF):
        places = {table[word] for word in spoken if word in table}
        if places:
            return places.pop() if len(places) == 1 else None
    return None


def names_embedding(prefix: str) -> bool:
    """Return whether a name calls its layer an embedding."""
    return any(word in _EMBEDDING_WORDS for part in parts(prefix) for word in words(part))


def names_output(prefix: str) -> bool:
    """Return whether a name's last part is one that nets give to their last layer."""
    return any(word in _OUTPUT_WORDS for word in words(parts(prefix)[-1]))


def names_block(prefix: str) -> bool:
    """Return whether a name says that its layer belongs to a block of layers."""
    return any(_BLOCK_WORD.fullmatch(word) for part in parts(prefix) for word in words(part))


Kind: TypeAlias = Literal["linear", "conv", "batch norm", "norm", "scale", "recurrent"]

MODEL_HINT = (
    "give the model's code with `model=file.py:factory`, or describe its axes in a plan (`plan`)"
)

_RECURRENT_LEAF = re.compile(r"(weight|bias)_(ih|hh|hr)(_l\d+(_reverse)?)?")
_IN_BLOCK = re.compile(
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
        if _IN_BLOCK.fullmatch(word.rstrip("0123456789_").lower()) or word.startswith("in_proj"):
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
        f"{MODEL_HINT}; `keep='{name}'` takes it from the first client as it is",
    )


_VGG9_WIDTHS = (32, 64, 128, 128, 256, 256, 512, 512)  # of the paper, without the output


@dataclass(frozen=True)
class KnownNet:
    """A chain of layers, each with a pattern of its name and its kind.

    Layers numbered without gaps may be a list that is no chain: such a net is recognised only by
    its `widths`, if it has any.
    """

    name: str
    layers: tuple[tuple[str, str], ...]  # kinds as in `Layer`, and "embedding" and "lstm"
    widths: tuple[int, ...] = ()

    def recognises(self, chain: Sequence[Layer]) -> bool:
        """Return whether the weighted layers are this net's."""
        return (
            len(chain) == len(self.layers)
            and all(
                re.fullmatch(pattern, layer.prefix) and _is_kind(layer, kind)
                for layer, (pattern, kind) in zip(chain, self.layers, strict=True)
            )
            and (not self.widths or self._has_widths(chain) or _has_gaps(chain))
        )

    def _has_widths(self, chain: Sequence[Layer]) -> bool:
        return tuple(layer.output_width for layer in chain[:-1]) == self.widths

    @property
    def starts_with_embedding(self) -> bool:
        """Whether the first matrix is an embedding."""
        return self.layers[0][1] == "embedding"


def recognise(chain: Sequence[Layer]) -> KnownNet | None:
    """Return the known net that these weighted layers are, in forward order, if any."""
    return next((net for net in KNOWN_NETS if net.recognises(chain)), None)


def _has_gaps(chain: Sequence[Layer]) -> bool:
    """Whether other modules stand between the numbered layers of each container."""
    return all(
        skeleton(one.prefix) != skeleton(other.prefix)
        or numbers(other.prefix)[-1] > numbers(one.prefix)[-1] + 1
        for one, other in pairwise(chain)
    )


def _is_kind(layer: Layer, kind: str) -> bool:
    if kind == "embedding":
        return layer.kind == "linear" and "bias" not in layer.tensors
    if kind == "lstm":
        return layer.kind == "recurrent" and _rows_per_state(layer) == 4
    return layer.kind == kind


def _rows_per_state(layer: Layer) -> float:
    rows, columns = next(i.shape for leaf, i in layer.tensors.items() if "weight_hh" in leaf)
    return rows / columns


def _numbered(stem: str, first: int, last: int, kind: str) -> tuple[tuple[str, str], ...]:
    return tuple((rf"(\D*\.)?{stem}_?{k}", kind) for k in range(first, last + 1))


def _sequential(container: str, count: int, kind: str) -> tuple[tuple[str, str], ...]:
    return ((rf"(.*\.)?{container}\.\d+", kind),) * count


_FEATURES, _CLASSIFIER = (
    "(features|conv_layer|conv_layers|conv)",
    "(classifier|fc_layer|fc_layers|fc)",
)
_EMBEDDING = (r"(.*\.)?(encoder|embed|embedding|embeddings|emb|word_embeddings?)", "embedding")
_RECURRENT_NAME = r"(.*\.)?(rnn|lstm|gru|blstm|bilstm)"
_DECODER = (
    r"(.*\.)?(decoder|fc|linear|out|output|classifier|head|hidden2tag|hidden2out)",
    "linear",
)


def _layer_called(name: str) -> tuple[str, str]:
    layer = "fc|lin|linear|dense|layer"
    return (rf"(\D*\.)?(({layer})_?)?({name})(_?({layer}))?", "linear")


_HIDDEN = _layer_called("hid|hidden|mid|middle")


def _in_hidden_out(*hidden: tuple[str, str]) -> KnownNet:
    layers = (_layer_called("in|inp|input|first"), *hidden, _layer_called("out|output|last|final"))
    return KnownNet("perceptron", layers)


KNOWN_NETS = (
    KnownNet("lenet", (*_numbered("conv", 1, 2, "conv"), *_numbered("fc", 1, 2, "linear"))),
    KnownNet("lenet-5", (*_numbered("conv", 1, 2, "conv"), *_numbered("fc", 1, 3, "linear"))),
    KnownNet(
        "vgg9",
        (*_sequential(_FEATURES, 6, "conv"), *_sequential(_CLASSIFIER, 3, "linear")),
        _VGG9_WIDTHS,
    ),
    KnownNet("vgg9", (*_numbered("conv", 1, 6, "conv"), *_numbered("fc", 7, 9, "linear"))),
    KnownNet("char-lstm", (_EMBEDDING, (_RECURRENT_NAME, "lstm"), _DECODER)),
    KnownNet("char-rnn", (_EMBEDDING, (_RECURRENT_NAME, "recurrent"), _DECODER)),
    KnownNet("sequence classifier", ((_RECURRENT_NAME, "recurrent"), _DECODER)),
    KnownNet("two-layer perceptron", _numbered("fc", 1, 2, "linear")),
    KnownNet("three-layer perceptron", _numbered("fc", 1, 3, "linear")),
    _in_hidden_out(),
    _in_hidden_out(_HIDDEN),
    *(_in_hidden_out(*_numbered("(?:h|hidden)(?:_?layer)?", 1, k, "linear")) for k in (1, 2, 3)),
)
