"""Lightning checkpoints: what is in them besides the state dict, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedmerge.checkpoint.pickle_machine import Inert
from fedmerge.decoding import shortened
from fedmerge.errors import UsageError

LIGHTNING = ".ckpt"  # how a Lightning checkpoint's name ends
STATE_DICT = "state_dict"
_VERSION = "pytorch-lightning_version"
_NEEDED = ("hyper_parameters", "hparams_name", "hparams_type")  # all that has to do with building
_DEEPEST = 32  # hyper-parameters within each other
_MOST_VALUES = 100_000
_MAPPINGS = ("AttributeDict",)  # Lightning's own, which a file may name where that is allowed
_INSTEAD = "let the output end in .pt: load it with `model.load_state_dict`"


@dataclass(frozen=True)
class LightningEntries:
    """What a Lightning checkpoint holds besides weights, or why it can't be written again."""

    values: Mapping[str, Any]
    problem: str = ""


def lightning_entries(tree: object) -> LightningEntries | None:
    """Return what a file's objects say of a Lightning module, None if they are of none.

    Only plain values are taken: numbers, text, None, and lists and dictionaries of them.
    """
    if not isinstance(tree, Mapping) or not isinstance(tree.get(STATE_DICT), Mapping):
        return None
    version = tree.get(_VERSION)
    if not isinstance(version, str):
        return None
    counter = iter(range(_MOST_VALUES))
    values: dict[str, Any] = {"epoch": 0, "global_step": 0, _VERSION: version}
    try:
        for name in _NEEDED:
            if tree.get(name) is not None:
                values[name] = _plain(tree[name], name, _DEEPEST, counter)
    except _NotPlainError as error:
        return LightningEntries({}, str(error))
    return LightningEntries(values)


def entries_to_write(entries: LightningEntries | None, *, source: str, path: object) -> Any:
    """Return the entries of a Lightning checkpoint, or say why none is written."""
    if entries is None:
        raise UsageError(
            f"{path}: {source} is no Lightning checkpoint, which is what .ckpt stands for",
            _INSTEAD,
        )
    if entries.problem:
        raise UsageError(
            f"{path}: no Lightning checkpoint can be written: {source} has {entries.problem}",
            _INSTEAD,
        )
    return entries.values


class _NotPlainError(Exception):
    """A value that is neither plain nor made of plain values."""


def _plain(value: object, place: str, depth: int, counter: Any) -> Any:
    if next(counter, None) is None or depth == 0:
        raise _NotPlainError("too many hyper-parameters")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Inert) and value.name.rpartition(".")[2] in _MAPPINGS:
        value = value.content or {}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        inner = [_plain(v, f"{place}[{k}]", depth - 1, counter) for k, v in enumerate(value)]
        return inner if isinstance(value, list) else tuple(inner)
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {k: _plain(v, f"{place}.{k}", depth - 1, counter) for k, v in value.items()}
    kind = value.name if isinstance(value, Inert) else type(value).__name__
    raise _NotPlainError(f"the hyper-parameter '{shortened(place)}' ({shortened(kind)})")
