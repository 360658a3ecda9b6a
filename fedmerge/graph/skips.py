"""Equal hidden widths could hide an additive skip, which leaves no trace in a state dict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedmerge.errors import ArchitectureError
from fedmerge.graph.layers import MODEL_HINT

_NUMBERED = re.compile(
    r"(?:.*\.)?(conv|conv_|fc|fc_|lin|linear|linear_|dense|dense_|hidden|h|l|layer|ip|lstm|gru|rnn)"
    r"(\d+)"
)
_SEQUENTIAL = re.compile(r"(?:([A-Za-z_]+\d*)\.)?(\d+)")


@dataclass(frozen=True)
class Activation:
    """What one layer of a chain gives: its width and how many spatial axes it has."""

    prefix: str
    width: int
    spatial: int


def refuse_hidden_skips(activations: Sequence[Activation]) -> None:
    """Refuse a chain in which two activations could be added, unless its names rule that out.

    `activations` are the input, then one per layer, the output last.
    """
    hidden = activations[:-1]
    layers = [activation.prefix for activation in activations[1:]]
    for later, activation in enumerate(hidden):
        for earlier in hidden[:later]:
            if (earlier.width, earlier.spatial) != (activation.width, activation.spatial):
                continue
            if _distinctly_numbered(layers) or _plain_sequential(layers):
                return
            raise ArchitectureError(
                f"'{earlier.prefix}' and '{activation.prefix}' are both {activation.width} wide, "
                "so a skip connection between them can't be ruled out from names alone",
                f"if the net is a plain chain say --assume-chain, else {MODEL_HINT}",
            )


def _distinctly_numbered(prefixes: Sequence[str]) -> bool:
    """Whether the layers count up (conv1, conv2, fc1, fc2); the last may have any name."""
    found = [_NUMBERED.fullmatch(prefix) for prefix in prefixes[:-1]]
    numbers = [match.groups() for match in found if match]
    return len(numbers) == len(prefixes) - 1 and len(set(numbers)) == len(numbers)


def _plain_sequential(prefixes: Sequence[str]) -> bool:
    """Whether the layers stand in `nn.Sequential`s (`0`, `features.3`, `classifier.1`).

    Neighbours without a gap between their numbers have no activation between them: that is a
    list of layers, which the model's code may combine in any way.
    """
    found = [_SEQUENTIAL.fullmatch(prefix) for prefix in prefixes[:-1]]
    places = [(match[1], int(match[2])) for match in found if match]
    neighbours = pairwise(places)
    return len(places) == len(prefixes) - 1 and all(
        container != next_container or next_number > number + 1
        for (container, number), (next_container, next_number) in neighbours
    )
