"""Clients whose tensors are read with some axes changed; a merge of them without any trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import numpy as np

from fedmerge.types.arrays import Array, Float64Array
from fedmerge.types.clients import Client, ClientView
from fedmerge.workflow.merge import Merge

# tensor → axis → factors (axis,) of its positions, or a matrix (axis, axis) that they are times
Change: TypeAlias = Mapping[str, Mapping[int, Float64Array]]


@dataclass(frozen=True)
class Rewritten(ClientView):
    """A client whose tensors are changed along some axes when they are read."""

    changes: tuple[Change, ...]

    def read(self, name: str) -> Array:
        """Return a tensor, changed."""
        values = self.client.read(name)
        return reduce(lambda now, change: changed(now, name, change), self.changes, values)


def changed(values: Array, name: str, change: Change) -> Array:
    """Return a tensor after a change, in its own precision."""
    for axis, factors in change.get(name, {}).items():
        values = _along(values, axis, factors).astype(values.dtype, copy=False)
    return values


def _along(values: Array, axis: int, factors: Float64Array) -> Array:
    if factors.ndim == 1:
        return np.asarray(values * factors.reshape([-1] + [1] * (values.ndim - axis - 1)))
    return np.moveaxis(np.tensordot(values, factors, axes=(axis, 0)), -1, axis)


def settled(merge: Merge, clients: Sequence[Client]) -> Merge:
    """Return a merge of rewritten clients as one of clients that they were written from.

    Tensors that any of them reads otherwise don't follow from these: they are held.
    """
    pairs = zip(merge.aligned, clients, strict=True)
    touched = {name for one, other in pairs for name in _rewritten_names(one, other)}
    held = {name: merge.read(name) for name in merge.plan.tensors if name in touched}
    return replace(merge, aligned=clients, fitted={**merge.fitted, **held})


def stored(client: Client) -> Client:
    """Return a client as it was before it was rewritten."""
    return stored(client.client) if isinstance(client, Rewritten) else client


def _rewritten_names(client: Client, source: Client) -> Iterator[str]:
    """Yield the tensors in which a client may differ from the one it was written from."""
    while client is not source:
        assert isinstance(client, Rewritten), "not written from this one"
        yield from (name for change in client.changes for name in change)
        client = client.client
