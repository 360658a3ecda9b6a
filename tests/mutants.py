"""JSON values with something wrong somewhere: other types, sizes, names, nesting, more or less."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

_DEEP: Any = []
for _ in range(50):
    _DEEP = [_DEEP]

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 10**12, -(10**12), 2**63, 10**40, 0.5, -0.5, 1e30, 1e300),
    *("", "x", "..", "../up", "/etc/passwd", "a\0b", "none", "nan", "é" * 9, "n" * 100_000),
    *([], [0], [-1], [[]], [None], ["x"], [10**12], [[0, 1], [1]], {}, {"x": 1}, {"": None}),
    *({"prod": []}, {"prod": ["x", 0]}, {"cat": [1, 2]}, {"pinned": 10**12}, _DEEP),
)


def mutant(value: Any, rng: random.Random, *, changes: int = 1) -> Any:
    """Return a copy of a JSON value that differs at some places."""
    changed = copy.deepcopy(value)
    for _ in range(changes):
        places = list(_places(changed))
        if places:
            holder, key = rng.choice(places)
            _change(holder, key, rng)
    return changed


def _places(value: Any, deepest: int = 12) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a value, those of long lists and objects by their first few entries."""
    if not deepest or not isinstance(value, dict | list):
        return
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys[:30]:
        yield value, key
        yield from _places(value[key], deepest - 1)


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    kind = rng.randrange(10)
    if kind < 5:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif kind == 5:
        del holder[key]
    elif kind == 6 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "n" * 10_000, key + "x"))] = holder.pop(key)
    elif kind == 7 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == 8 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * rng.choice((-1, 2, 10**6)) + rng.choice((-1, 0, 1))
    elif kind == 9 and isinstance(holder, dict):
        other = rng.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = [holder[key]]
