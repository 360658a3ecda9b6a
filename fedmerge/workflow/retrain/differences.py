"""In what the run of a work dir differs from the one that wants to go on with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fedmerge.types.words import listed

MOST_CHANGED = 8  # clients whose files differ that an error names


def first_difference(found: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the first value in which two runs differ, in words."""
    for name in [*saved, *(key for key in found if key not in saved)]:
        one, other = found.get(name), saved.get(name)
        if one != other:
            return _DIFFERENCES.get(name, _plain_difference)(name, one, other)
    return None


def _plain_difference(name: str, found: Any, saved: Any) -> str:
    return f"{name} is {json.dumps(found)}, was {json.dumps(saved)}"


def _inner_difference(name: str, found: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    difference = first_difference(found, saved)
    assert difference is not None, f"'{name}' differs"
    return difference


def _files_difference(name: str, found: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return in words how the digests of clients, or of their shards, differ."""
    what = _EACH[name]
    for client in (*found, *saved):
        if (client in found) != (client in saved):
            return f"{client} is {'new' if client in found else 'gone'} among the {what}"
    changed = [client for client in found if found[client] != saved[client]]
    return f"the {what} of {listed(changed, MOST_CHANGED)} are not the same"


def _given_difference(name: str, found: str | None, saved: str | None) -> str:
    """Return in words how one of the files of a run differs."""
    if found is None or saved is None:
        return f"{_FILES[name]} is {'not' if found is None else 'now'} given"
    return f"{_FILES[name]} is another one"


_EACH = {"clients": "models", "shards": "shards"}
_FILES = {"data": "--data", "continued_from": "the merged file", "sha256": "the code of --model"}
_DIFFERENCES: Mapping[str, Callable[[str, Any, Any], str]] = {
    "options": _inner_difference,
    "model": _inner_difference,
    "name": lambda name, found, saved: f"--model is {found}, was {saved}",
    "arguments": lambda name, found, saved: f"--model-arg is {found}, was {saved}",
    "sha256": _given_difference,
    "continued_from": _given_difference,
    "clients": _files_difference,
    "shards": _files_difference,
    "data": _given_difference,
    "plan": lambda name, found, saved: "the plan is another one",
}
