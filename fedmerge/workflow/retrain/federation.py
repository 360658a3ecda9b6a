"""The server's side of a run between two rounds, and what a round brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedmerge.types.layouts import Widths
from fedmerge.types.work import Arrays
from fedmerge.units import Averaging, Placement
from fedmerge.workflow.record import GroupEntry
from fedmerge.workflow.retrain.locals import LocalModel
from fedmerge.workflow.retrain.schedule import Round


@dataclass(frozen=True)
class Federation:
    """What is decided of the global model, and the clients' models without that."""

    locals: tuple[LocalModel, ...]  # in a mixed layout
    fixed: Arrays  # global tensors, the same for all clients
    placements: tuple[Placement, ...]  # per client, of the groups matched in this pass
    groups: tuple[GroupEntry, ...]  # matched in this pass

    @property
    def widths(self) -> dict[str, int]:
        """The global width of every group matched in this pass."""
        return {group: assignment.width for group, assignment in self.placements[0].items()}

    def with_locals(self, models: Mapping[int, LocalModel]) -> Federation:
        """Return the federation with some clients' models replaced."""
        pairs = enumerate(self.locals)
        return replace(self, locals=tuple(models.get(k, model) for k, model in pairs))


@dataclass(frozen=True)
class Exchange:
    """What one exchange decided, and the bytes that a client must send and get for it."""

    federation: Federation
    up: int  # of all clients that took part
    down: int  # to all clients
    matched: GroupEntry | None = None


@dataclass(frozen=True)
class Decided:
    """What is the same for all clients after some rounds."""

    groups: tuple[str, ...]  # whose units have their global places, in the order of matching
    tensors: tuple[str, ...]  # that are fixed, besides those that everybody takes as they are


class Method(Protocol):
    """How a global model comes from the clients' models: the server's side of an algorithm."""

    @property
    def rounds(self) -> Sequence[Round]:
        """All rounds."""

    @property
    def initial(self) -> Sequence[LocalModel]:
        """The clients' models as they came."""

    @property
    def kept(self) -> Arrays:
        """The first client's tensors that everybody takes as they are."""

    def decided(self, done: int) -> Decided:
        """Return what is decided after so many rounds, at least one."""

    def start(self) -> Federation:
        """Return the federation before the first round."""

    def begin(self, federation: Federation, current: Round) -> Federation:
        """Return the federation as clients get it for a round."""

    def client_widths(self, federation: Federation, client: int) -> Widths:
        """Return the widths of a client's model in its present layout."""

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Return what the models of the clients that are present decide."""


def averaging_of(averaging: Averaging, present: Sequence[int]) -> Averaging:
    """Return how much the clients that are present count among themselves."""
    weights = tuple(averaging.client_weights[client] for client in present)
    if averaging.class_weights is None:
        return replace(averaging, client_weights=weights)
    table = averaging.class_weights[list(present)]
    totals = table.sum(axis=0)
    shares = [[weight / sum(weights)] for weight in weights]
    table = np.where(totals > 0, table / np.where(totals > 0, totals, 1.0), shares)
    return replace(averaging, client_weights=weights, class_weights=table)
