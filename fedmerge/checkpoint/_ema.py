"""Tell an exponential moving average (EMA) of the weights from the raw weights."""

import re
from collections.abc import Mapping

from fedmerge.checkpoint._tensors import StoredTensor

Tensors = Mapping[str, StoredTensor]
_MOST_PREFIXES = 16  # that are tried; wrappers put one or two in front of all names
_WORD = re.compile(  # model_ema, EMA; EMACallback; modelEma
    r"(?<![a-zA-Z0-9])(?i:ema)(?![a-zA-Z0-9])"
    r"|(?<![A-Z])EMA(?=[A-Z][a-z])"
    r"|(?<=[a-z])(?:EMA|Ema)(?![a-z])"
)


def is_ema(path: str) -> bool:
    """Whether "ema" is a word of a dotted path.

    >>> [is_ema(path) for path in ("model_ema", "ema.fc.weight", "EMACallback", "modelEMA")]
    [True, True, True, True]
    >>> [is_ema(path) for path in ("schema.weight", "SCHEMAView", "email", "emap.weight")]
    [False, False, False, False]
    """
    return _WORD.search(path) is not None


def split_ema(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the raw tensors and their EMA copies, the copies under the raw names.

    Names with the word "ema" that copy nothing are ordinary layers and stay with the raw ones.
    """
    tails = {name: _after_ema(name) for name in tensors if is_ema(name)}
    raw = {name: tensor for name, tensor in tensors.items() if name not in tails}
    copies = {name: tail for name, tail in tails.items() if tensors[name].is_weight}
    if not copies:
        return tensors, {}
    if not any(tensor.is_weight for tensor in raw.values()):
        return {}, {tail: tensors[name] for name, tail in tails.items() if tail}
    for prefix in _prefixes(raw, next(iter(copies.values())))[:_MOST_PREFIXES]:
        twins = {_squashed(n[len(prefix) :]): n for n in raw if n.startswith(prefix)}
        if all(
            _is_copy(tensors, name, twins.get(_squashed(tail))) for name, tail in copies.items()
        ):
            pairs = {twins.get(_squashed(tail)): name for name, tail in tails.items()}
            return raw, {n: tensors[pairs[n]] for n in raw if n in pairs}
    return tensors, {}


def _after_ema(name: str) -> str:
    parts = name.split(".")
    place = next(index for index, part in enumerate(parts) if is_ema(part))
    return ".".join(parts[place + 1 :])


def _prefixes(raw: Tensors, tail: str) -> list[str]:
    """Return each "a.b." in front of a raw name that goes on like the tail, shortest first."""
    end = _squashed(tail)
    ends = [
        (name, len(squashed) - len(end))
        for name in raw
        if (squashed := _squashed(name)).endswith(end)
    ]
    found = {front for name, letters in ends if (front := _front(name, letters)) is not None}
    return sorted(found, key=lambda prefix: (prefix.count("."), prefix))


def _front(name: str, letters: int) -> str | None:
    """Return the "a.b." in front of a name that has so many letters, None if none has."""
    front, left = "", letters
    for part in name.split(".")[:-1]:
        if left <= 0:
            break
        front, left = f"{front}{part}.", left - len(part)
    return front if left == 0 else None


def _squashed(name: str) -> str:
    """Drop the dots, as some EMA classes do to get valid buffer names."""
    return name.replace(".", "")


def _is_copy(tensors: Tensors, name: str, twin: str | None) -> bool:
    return twin is not None and tensors[name].info.shape == tensors[twin].info.shape
