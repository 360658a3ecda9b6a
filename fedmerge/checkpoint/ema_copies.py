"""EMA copies of weights, told from the raw ones by the word in their names."""

import re
from collections.abc import Mapping

from fedmerge.checkpoint.files import listed
from fedmerge.checkpoint.tensors import StoredTensor
from fedmerge.errors import CheckpointError

Tensors = Mapping[str, StoredTensor]
_MOST_PREFIXES = 16  # that are tried; wrappers put one or two in front of all names
EMA = re.compile(  # model_ema, EMA; EMACallback; modelEma
    r"(?<![a-zA-Z0-9])(?i:ema)(?![a-zA-Z0-9])"
    r"|(?<![A-Z])EMA(?=[A-Z][a-z])"
    r"|(?<=[a-z])(?:EMA|Ema)(?![a-z])"
)


def split_ema(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the raw tensors and their EMA copies, the copies under the raw names.

    Names with the word "ema" that copy nothing are ordinary layers and stay with the raw ones.
    """
    tails = {name: _after_ema(name) for name in tensors if EMA.search(name)}
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
    place = next(index for index, part in enumerate(parts) if EMA.search(part))
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


def choose_copy(
    location: str, tensors: Tensors, wanted: str | None, label: str
) -> tuple[Tensors, str, list[str]]:
    """Return the raw tensors or their EMA copies, which of them, and what was passed over."""
    raw, ema = ({}, tensors) if EMA.search(location) else split_ema(tensors)
    copies = {"raw": raw, "ema": ema}
    weights = wanted or ("raw" if raw else "ema")
    taken, left = copies[weights], copies["ema" if weights == "raw" else "raw"]
    if not taken:
        raise CheckpointError(
            f"{label}: has no {weights} weights", "leave out `weights`, or choose the others"
        )
    lacking = [name for name in left if name not in taken] if weights == "ema" else []
    notes = [f"the EMA copy lacks {listed(lacking)}"] if lacking else []
    if weights == "raw" and left:
        notes.append(f"an EMA copy of {len(left)} tensors ignored")
    return taken, weights, notes
