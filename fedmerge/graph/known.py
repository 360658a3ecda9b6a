"""Nets that are recognised by their names and shapes, so that nothing about them is guessed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedmerge.graph.layers import Layer
from fedmerge.graph.names import numbers, skeleton

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
