"""Which nodes of a cluster can run which clients, and how many at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LABEL = "client:"  # a node's resource of this name and a client's keeps that client to the node
_ROUNDING = 1e-9  # ten tenths of a processor are one


@dataclass(frozen=True)
class Node:
    """A node that is up, and what it has in all."""

    id: str
    address: str
    resources: Mapping[str, float]

    def has_label(self, client: str) -> bool:
        """Whether the client's shard is said to lie here."""
        return self.resources.get(LABEL + client, 0) > 0


@dataclass(frozen=True)
class Share:
    """What one client gets of a node while it trains."""

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")

    def slots(self, node: Node) -> int:
        """Return how many clients fit on a node; they may share a GPU, none gets parts of two."""
        counts = [node.resources.get("CPU", 0) / self.cpus]
        gpus = node.resources.get("GPU", 0)
        if self.gpus >= 1:
            counts.append(gpus / self.gpus)
        elif self.gpus:
            counts.append(math.floor(gpus) * math.floor(1 / self.gpus + _ROUNDING))
        return math.floor(min(counts) + _ROUNDING)


@dataclass
class Homes:
    """Where clients belong: a client that a label was ever seen of stays with its label."""

    share: Share
    labelled: set[str] = field(default_factory=set)

    def find(self, clients: Sequence[str], nodes: Sequence[Node]) -> dict[str, tuple[Node, ...]]:
        """Return the nodes that each client can run on, none for those that have to wait.

        The order is the one in which clients are best started: those of one node do not keep
        the slots of the others empty.
        """
        self.labelled |= {name for name in clients if any(n.has_label(name) for n in nodes)}
        useful = [node for node in nodes if self.share.slots(node)]
        homes = {name: self._homes(name, useful) for name in clients}
        ranks = self._ranks(homes)
        return {name: homes[name] for name in sorted(homes, key=ranks.__getitem__)}

    def _homes(self, client: str, nodes: Iterable[Node]) -> tuple[Node, ...]:
        is_pinned = client in self.labelled
        return tuple(node for node in nodes if not is_pinned or node.has_label(client))

    def _ranks(self, homes: Mapping[str, tuple[Node, ...]]) -> dict[str, float]:
        """Return each client's turn: how many of the same nodes come before ÷ their slots."""
        before: dict[tuple[str, ...], int] = {}
        ranks = {}
        for name, nodes in homes.items():
            key = tuple(node.id for node in nodes)
            ranks[name] = before.get(key, 0) / max(1, sum(map(self.share.slots, nodes)))
            before[key] = before.get(key, 0) + 1
        return ranks
