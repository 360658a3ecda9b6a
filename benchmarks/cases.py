"""What is matched in the benchmarks: a net, how its clients resemble each other, how many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.nets import NETS, Net, State, independent_clients, noisy_copies
from fedmerge import MatchOptions
from fedmerge.matching import GroupMatching
from fedmerge.merging import Session, Solution, expand_sources, open_clients, prepare, solve
from fedmerge.values import silent

SWEEPS = 5  # as many as the paper's code makes


@dataclass(frozen=True)
class Kind:
    """How clients resemble each other, and the threshold at which they are matched."""

    clients: Callable[[Net, int], Iterator[State]]
    threshold: float


KINDS: Mapping[str, Kind] = {
    "copies": Kind(noisy_copies, 0.5),
    "independent": Kind(independent_clients, 0.03),
    "nothing matches": Kind(independent_clients, 0.9),
}


@dataclass(frozen=True)
class Case:
    """One matching at a fixed threshold: no size budget, no refinement."""

    net: str
    kind: str
    clients: int

    @property
    def title(self) -> str:
        """How results call it."""
        return f"{self.net}, {self.clients} clients, {self.kind}"

    @property
    def options(self) -> MatchOptions:
        """The options of the matching."""
        threshold = KINDS[self.kind].threshold
        return MatchOptions(max_growth="none", match_threshold=threshold, refine=0, sweeps=SWEEPS)

    def states(self) -> Iterator[State]:
        """Yield the clients."""
        return KINDS[self.kind].clients(NETS[self.net](), self.clients)

    def session(self) -> Session:
        """Return the clients opened, planned and checked: all that precedes the matching."""
        opened = open_clients(expand_sources(list(self.states())), self.options.reading)
        return prepare(opened, self.options)


def run(session: Session) -> Solution:
    """Match every group of the plan once."""
    return solve(session, silent)


def labels(solution: Solution) -> dict[str, list[int]]:
    """Return every group's global units, client after client, numbered as they first appear."""
    return {group: _labels_of(matching) for group, matching in solution.matchings.items()}


def _labels_of(matching: GroupMatching) -> list[int]:
    homes = np.concatenate([assignment.indices for assignment in matching.assignments])
    _, first, inverse = np.unique(homes, return_index=True, return_inverse=True)
    ranks = np.empty(len(first), dtype=np.int64)
    ranks[np.argsort(first)] = np.arange(len(first))
    numbered: list[int] = ranks[inverse].tolist()
    return numbered
