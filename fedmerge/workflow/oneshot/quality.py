"""What is expected of a merge, from how it answers probes that decided nothing about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmerge.workflow.oneshot.agreement import Agreement

OUTLYING = 0.5  # of the median client's agreement with the others: below it a client is an outlier
NOTICEABLE = 0.01  # of the outputs' variance: what less is explained does not matter
CHANCE = 2.0  # deviations of an agreement over so many samples
FEWEST = 3  # clients, of which one can be told to be unlike the others


@dataclass(frozen=True)
class Quality:
    """How often a merge and every client decide as the ensemble does, on held-out probes."""

    source: str  # of the probes
    samples: int
    merged: Agreement
    clients: Mapping[str, Agreement]  # with the ensemble of all
    candidates: Mapping[str, Agreement]
    chosen: str  # which candidate the merge is
    outliers: tuple[str, ...]  # clients that answer unlike the others
    dropped: tuple[str, ...] = ()  # clients that were left out for that

    @property
    def best_client(self) -> str:
        """The client that is most alike the ensemble."""
        return max(self.clients, key=lambda name: self.clients[name].rank)

    def to_json(self) -> dict[str, Any]:
        """Return the quality as JSON values."""
        return {
            "probes": self.source,
            "samples": self.samples,
            "agreement": self.merged.to_json(),
            "clients": {name: own.to_json() for name, own in self.clients.items()},
            "candidates": {name: own.to_json() for name, own in self.candidates.items()},
            "chosen": self.chosen,
            "outliers": list(self.outliers),
            "dropped": list(self.dropped),
        }

    def warnings(self) -> Iterator[str]:
        """Say what speaks against the merge."""
        best = self.clients[self.best_client]
        if (self.merged.decisions, self.merged.explained + NOTICEABLE) < best.rank:
            yield (
                f"the merge is predicted to be worse than client {self.best_client}: on "
                f"{self.samples} {self.source} probes it decides as the ensemble does in "
                f"{self.merged.decisions:.1%} and explains {self.merged.explained:.1%} of its "
                f"outputs, {self.best_client} {best.decisions:.1%} and {best.explained:.1%}"
            )
        for name in self.outliers:
            yield (
                f"client {name} answers unlike the others (untrained, diverged or of another "
                "task?): leave it out with --drop-outliers"
            )
        for name in self.dropped:
            yield f"client {name} was left out: it answers unlike the others"


def outliers(agreements: Sequence[Sequence[float]], samples: int) -> list[int]:
    """Return the clients whose agreement with the others is far below the median client's.

    Each client is compared with every other one, not with their mean, which a single diverged
    client would decide; what so few samples may show by chance does not count.
    """
    if len(agreements) < FEWEST:
        return []
    each = [float(np.median(others)) for others in agreements]
    limit = OUTLYING * float(np.median(each))
    chance = CHANCE * np.sqrt(limit * (1 - limit) / samples)
    return [number for number, own in enumerate(each) if own < limit - chance]
