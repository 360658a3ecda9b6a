"""Find the state dict in a container's object tree."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fedmerge.checkpoint._contents import ReadOptions
from fedmerge.checkpoint._ema import is_ema
from fedmerge.checkpoint._failures import listed
from fedmerge.checkpoint._machine import Inert
from fedmerge.checkpoint._tensors import StoredTensor, describe
from fedmerge.errors import CheckpointError

_Path = tuple[str, ...]
_DEEPEST = 64  # levels searched; no real checkpoint nests its tensors as deep
_LONGEST_PATH = 1_000  # characters of all names on the way to a state dict
_MOST_CONTAINERS = 100_000  # lists and dictionaries searched


@dataclass(frozen=True)
class Candidate:
    """One mapping of names to tensors, and the names it holds besides."""

    location: str  # dotted path, "" for the top level
    tensors: Mapping[str, StoredTensor]
    ignored: tuple[str, ...]

    @property
    def has_weights(self) -> bool:
        """Whether any of its tensors could be a layer's weights."""
        return any(tensor.is_weight for tensor in self.tensors.values())


@dataclass(frozen=True)
class Choice:
    """The state dict to use and what was passed over."""

    candidate: Candidate
    notes: tuple[str, ...] = ()


def choose(tree: object, options: ReadOptions, *, label: str) -> Choice:
    """Return the state dict that the options mean; raise if there is none or more than one."""
    root, start = _start(tree, options.key, label)
    if options.key is not None and (at_root := _candidate(start, root)):
        return Choice(at_root)
    found, optimizer = _walk(root, start, label)
    found = [c for c in found if c.has_weights] or ([] if optimizer else found)
    pool = _pool(found, options)
    if not pool:
        raise _nothing(found, options, label, optimizer=optimizer)
    if len(pool) > 1:
        raise _several(pool, label)
    copies = [c.location for c in found if is_ema(c.location) and c not in pool]
    notes = (
        *(["optimizer states ignored"] if optimizer else []),
        *(f"the EMA copy '{location}' ignored" for location in copies),
    )
    return Choice(pool[0], notes)


def _pool(found: list[Candidate], options: ReadOptions) -> list[Candidate]:
    raw = [c for c in found if not is_ema(c.location)]
    ema = [c for c in found if is_ema(c.location)]
    # An EMA copy may also hide among the names of the raw state dict.
    return {"raw": raw, "ema": ema or raw, None: raw or ema}[options.weights]


def _start(tree: object, key: str | None, label: str) -> tuple[_Path, object]:
    if key is None or key == ".":
        return (), tree
    places = dict(_descend(tree, key, ()))
    if not places:
        known, _ = _walk((), tree, label)
        held = listed(list(map(_describe, known))) or "none"
        raise CheckpointError(f"{label}: has no '{key}'", f"state dicts in it: {held}")
    return next(iter(places.items()))


def _descend(node: object, key: str, path: _Path) -> Iterator[tuple[_Path, object]]:
    """Yield what lies at a dotted path whose parts may have dots themselves."""
    for name, child in _children(node):
        if name == key:
            yield (*path, name), child
        elif name and key.startswith(name + "."):
            yield from _descend(child, key[len(name) + 1 :], (*path, name))


def _walk(root: _Path, start: object, label: str) -> tuple[list[Candidate], bool]:
    """Return every mapping of tensors, and whether optimizer states were left out.

    Each container is visited once, so cycles do no harm.
    """
    queue, seen = deque([(root, start)]), {id(start)}
    candidates: list[Candidate] = []
    optimizer = False
    while queue:
        path, node = queue.popleft()
        if _is_optimizer(path, node):
            optimizer = True
            continue
        candidate = _candidate(node, path)
        candidates += [candidate] if candidate else []
        for name, child in _children(node):
            if _is_container(child) and id(child) not in seen and len(path) < _DEEPEST:
                seen.add(id(child))
                queue.append(((*path, name), child))
                _check_budget(len(seen), path, name, label)
    return candidates, optimizer


def leaves(tree: object) -> list[StoredTensor]:
    """Return the tensors in lists, tuples and mappings, in order, of each container once."""
    found: list[StoredTensor] = []
    seen: set[int] = set()
    pending = [iter([("", tree)])]
    while pending and len(seen) < _MOST_CONTAINERS:
        _, node = next(pending[-1], ("", None))
        if node is None:
            pending.pop()
        elif isinstance(node, StoredTensor):
            found.append(node)
        elif _is_container(node) and id(node) not in seen:
            seen.add(id(node))
            pending.append(_children(node))
    return found


def _check_budget(count: int, path: _Path, name: str, label: str) -> None:
    if count > _MOST_CONTAINERS:
        raise CheckpointError(f"{label}: holds more than {_MOST_CONTAINERS:,} lists and mappings")
    if len(name) + sum(map(len, path)) > _LONGEST_PATH:
        raise CheckpointError(
            f"{label}: names in it have more than {_LONGEST_PATH:,} characters",
            "save the state dict alone, under names of ordinary length",
        )


def _is_container(node: object) -> bool:
    return isinstance(node, Mapping | list | tuple | Inert)


def _children(node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, Inert):
        node = node.content
    if isinstance(node, Mapping):
        yield from ((str(k), child) for k, child in node.items() if isinstance(k, str | int))
    elif isinstance(node, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(node))


def _is_optimizer(path: _Path, node: object) -> bool:
    if path and "optim" in path[-1].lower():
        return True
    return isinstance(node, Mapping) and "param_groups" in node and "state" in node


def _candidate(node: object, path: _Path) -> Candidate | None:
    if isinstance(node, Inert):
        node = node.content
    if not isinstance(node, Mapping):
        return None
    tensors = {
        key: describe(value) if isinstance(value, torch.Tensor) else value
        for key, value in node.items()
        if isinstance(key, str) and isinstance(value, torch.Tensor | StoredTensor)
    }
    ignored = tuple(str(key) for key in node if key not in tensors and isinstance(key, str | int))
    return Candidate(".".join(path), tensors, ignored) if tensors else None


def _describe(candidate: Candidate) -> str:
    place = f"'{candidate.location}'" if candidate.location else "'.' (the top level)"
    count = len(candidate.tensors)
    return f"{place} ({count} tensor{'s' if count > 1 else ''})"


def _several(pool: list[Candidate], label: str) -> CheckpointError:
    return CheckpointError(
        f"{label}: holds several state dicts: {listed(list(map(_describe, pool)))}",
        f"choose one, e.g. --key {pool[0].location or '.'}",
    )


def _nothing(
    found: list[Candidate], options: ReadOptions, label: str, *, optimizer: bool
) -> CheckpointError:
    if found:
        return CheckpointError(
            f"{label}: has no {options.weights} weights, only {_describe(found[0])}",
            "leave out --weights, or choose the others",
        )
    if optimizer:
        return CheckpointError(
            f"{label}: holds optimizer state only, no model", "give the model's checkpoint"
        )
    return CheckpointError(f"{label}: holds no tensors under names, so no state dict")
