"""Nets that are recognised by their names and shapes, so that nothing about them is guessed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedmerge.graph.layers import Layer


@dataclass(frozen=True)
class KnownNet:
    """A chain of layers, each with a pattern of its name and its kind; norms may stand between."""

    name: str
    layers: tuple[tuple[str, str], ...]  # kinds as in `Layer`, and "embedding" and "lstm"

    def recognises(self, layers: Sequence[Layer]) -> bool:
        """Return whether the layers are this net's."""
        chain = [layer for layer in layers if layer.kind not in ("batch norm", "norm", "scale")]
        return len(chain) == len(self.layers) and all(
            re.fullmatch(pattern, layer.prefix) and _is_kind(layer, kind)
            for layer, (pattern, kind) in zip(chain, self.layers, strict=True)
        )

    @property
    def starts_with_embedding(self) -> bool:
        """Whether the first matrix is an embedding."""
        return self.layers[0][1] == "embedding"


def recognise(layers: Sequence[Layer]) -> KnownNet | None:
    """Return the known net that these layers are, if any."""
    return next((net for net in KNOWN_NETS if net.recognises(layers)), None)


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
    return tuple((rf"(.*\.)?{stem}_?{k}", kind) for k in range(first, last + 1))


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

KNOWN_NETS = (
    KnownNet("lenet", (*_numbered("conv", 1, 2, "conv"), *_numbered("fc", 1, 2, "linear"))),
    KnownNet("lenet-5", (*_numbered("conv", 1, 2, "conv"), *_numbered("fc", 1, 3, "linear"))),
    KnownNet("vgg9", (*_sequential(_FEATURES, 6, "conv"), *_sequential(_CLASSIFIER, 3, "linear"))),
    KnownNet("vgg9", (*_numbered("conv", 1, 6, "conv"), *_numbered("fc", 7, 9, "linear"))),
    KnownNet("char-lstm", (_EMBEDDING, (_RECURRENT_NAME, "lstm"), _DECODER)),
    KnownNet("char-rnn", (_EMBEDDING, (_RECURRENT_NAME, "recurrent"), _DECODER)),
    KnownNet("sequence classifier", ((_RECURRENT_NAME, "recurrent"), _DECODER)),
    KnownNet("two-layer perceptron", _numbered("fc", 1, 2, "linear")),
    KnownNet("three-layer perceptron", _numbered("fc", 1, 3, "linear")),
)
