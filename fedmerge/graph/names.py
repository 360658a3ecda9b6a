"""What the names of layers tell: their numbers, their containers, their place in the net."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

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
