"""Names without what wrappers put in front of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_COMPILED = "_orig_mod"  # torch.compile, anywhere in a name
_PARALLEL = "module"  # DataParallel, in front of all names
_WRAPPED = "model"  # Lightning and others, in front of all names; stays in written names


@dataclass(frozen=True)
class Names:
    """Stored names and what they are called without wrappers."""

    plain: Mapping[str, str]  # stored name -> normalised name
    prefix: str  # "model." as often as it was in front of all names
    removed: tuple[str, ...]  # wrappers that were dropped, e.g. ("module.",)


def strip_wrappers(names: Iterable[str]) -> Names:
    """Drop wrappers from names, in any order and repeatedly.

    >>> names = strip_wrappers(["module.model._orig_mod.fc.weight"])
    >>> list(names.plain.values()), names.prefix, names.removed
    (['fc.weight'], 'model.', ('module.', '_orig_mod.'))
    """
    stored = {name: name.split(".") for name in names}
    parts = {name: _without_compiled(split) for name, split in stored.items()}
    front = _common_front(list(parts.values()))
    plain = {name: ".".join(rest[len(front) :]) for name, rest in parts.items()}
    removed = {
        f"{_PARALLEL}.": _PARALLEL in front,
        f"{_COMPILED}.": any(len(parts[name]) < len(stored[name]) for name in stored),
    }
    prefix = f"{_WRAPPED}." * front.count(_WRAPPED)
    return Names(plain, prefix, tuple(name for name, there in removed.items() if there))


def _without_compiled(parts: list[str]) -> list[str]:
    kept = [part for part in parts[:-1] if part != _COMPILED]
    return [*kept, parts[-1]]


def _common_front(names: list[list[str]]) -> list[str]:
    """Return the wrappers' names that all names start with, leaving each at least one part."""
    front: list[str] = []
    shortest = min((len(parts) for parts in names), default=0)
    for place in range(shortest - 1):
        here = {parts[place] for parts in names}
        if len(here) != 1 or not here <= {_PARALLEL, _WRAPPED}:
            break
        front += here
    return front
