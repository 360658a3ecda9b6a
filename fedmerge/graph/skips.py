"""Equal hidden widths could hide an additive skip, which leaves no trace in a state dict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedmerge.errors import ArchitectureError
from fedmerge.graph.layers import MODEL_HINT
from fedmerge.graph.names import names_block, names_output, without_common_parts

_NUMBERED = re.compile(r"((?:[A-Za-z_]+\.)*)(\w*?[A-Za-z]\w*?)_?(\d+)")
_SEQUENTIAL = re.compile(r"(?:([A-Za-z_]+\d*|\d+(?:\.\d+)*)\.)?(\d+)")


@dataclass(frozen=True)
class Activation:
    """What one layer of a chain gives: its width and how many spatial axes it has."""

    prefix: str
    width: int
    spatial: int
    kind: str  # of the layer that gives it, or "input"


def refuse_hidden_skips(activations: Sequence[Activation]) -> None:
    """Refuse a chain in which two activations could be added, unless its names rule that out.

    `activations` are the input (unless it is tokens), then one per layer, the output last. Input
    and output are both pinned, so it does no harm if the one is added to the other.
    """
    layers = [activation for activation in activations if activation.kind != "input"]
    ruled_out = {to_output: _rule_out(layers, to_output) for to_output in (False, True)}
    for later, activation in enumerate(activations):
        is_output = later == len(activations) - 1
        for earlier in activations[:later]:
            if (earlier.width, earlier.spatial) != (activation.width, activation.spatial):
                continue
            if (is_output and earlier.kind == "input") or ruled_out[is_output]:
                continue
            raise ArchitectureError(
                f"'{earlier.prefix}' and '{activation.prefix}' are both {activation.width} wide, "
                "so a skip connection between them can't be ruled out from names alone",
                f"if the net is a plain chain say --assume-chain, else {MODEL_HINT}",
            )


def _rule_out(layers: Sequence[Activation], to_output: bool) -> bool:
    """Whether the names are those of a plain chain: numbered layers, or `nn.Sequential`s.

    Embeddings, one recurrent layer and the last layer need no number.
    """
    if any(names_block(layer.prefix) for layer in layers):
        return False
    names = without_common_parts([layer.prefix for layer in layers])
    recurrent = sum(1 for layer in layers if layer.kind == "recurrent")
    checked = [
        name
        for layer, name in zip(layers, names, strict=True)
        if _is_placed(name)
        or not (layer.kind == "embedding" or (layer.kind == "recurrent" and recurrent == 1))
    ]
    if checked and checked[-1] == names[-1] and not _is_placed(names[-1]):
        if to_output and not names_output(names[-1]):
            return False
        checked = checked[:-1]
    sequential = [name for name in checked if _SEQUENTIAL.fullmatch(name)]
    others = [name for name in checked if not _SEQUENTIAL.fullmatch(name)]
    return _have_gaps(sequential) and _count_up(others)


def _is_placed(name: str) -> bool:
    return bool(_SEQUENTIAL.fullmatch(name) or _NUMBERED.fullmatch(name))


def _count_up(names: Sequence[str]) -> bool:
    """Whether the names count up without gaps (conv1, conv2, fc1, fc2), each stem for itself.

    The first of a stem may have no number (fc, fc2).
    """
    counted: dict[str, list[int]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        stem = (found[1] + found[2] if found else name).lower()
        counted.setdefault(stem, []).append(int(found[3]) if found else 1)
    unnumbered = {name.lower() for name in names if not _NUMBERED.fullmatch(name)}
    return all(
        all(later == earlier + 1 for earlier, later in pairwise(numbers))
        and (stem not in unnumbered or len(numbers) > 1)
        for stem, numbers in counted.items()
    )


def _have_gaps(names: Sequence[str]) -> bool:
    """Whether the layers of each `nn.Sequential` (`0`, `features.3`) have modules between them.

    Neighbours without a gap between their numbers have no activation between them: that is a
    list of layers, which the model's code may combine in any way.
    """
    found = [_SEQUENTIAL.fullmatch(name) for name in names]
    places = [(match[1], int(match[2])) for match in found if match]
    return all(
        container != next_container or next_number > number + 1
        for (container, number), (next_container, next_number) in pairwise(places)
    )
