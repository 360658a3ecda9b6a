"""What is expected of a merge, from how it answers probes that decided nothing about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedmerge.types.words import percent
from fedmerge.workflow.oneshot.agreement import Agreement

DATA = "data"  # the source of real inputs
OPTIMISM = 3.0  # by which made-up inputs understate a merge's disagreement beside a client's
CHANCE = 1.0  # deviations of a lead over so many probes: what is less may be chance
ALIKE = 0.5  # share of probes below which clients differ more often than not
NOTICEABLE = 0.01  # of the outputs' variance: what less is explained does not matter


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
    alike: float | None = None  # share of equal decisions of two clients, in the mean

    @property
    def best_client(self) -> str:
        """The client that is most alike the ensemble."""
        return max(self.clients, key=lambda name: self.clients[name].rank)

    @property
    def _is_real(self) -> bool:
        return self.source == DATA

    @property
    def _may_be_worse(self) -> bool:
        """Whether the merge is not clearly better than the best client.

        Real inputs: its lead may be chance. Made-up ones, of the kind that the merge was fitted on:
        its disagreement with the ensemble counts several times.
        """
        wrong, best = (1 - a.decisions for a in (self.merged, self.clients[self.best_client]))
        if self._is_real:
            return best - wrong < CHANCE * math.sqrt((best + wrong) / self.samples)
        return OPTIMISM * wrong > best

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
            "clients_alike": self.alike,
        }

    def warnings(self) -> Iterator[str]:
        """Say what speaks against the merge."""
        best = self.clients[self.best_client]
        compared = (
            f"on {self.samples} {self.source} probes it decides as the ensemble does in "
            f"{percent(self.merged.decisions)} and explains {percent(self.merged.explained)} of "
            f"its outputs, {self.best_client} {percent(best.decisions)} "
            f"and {percent(best.explained)}"
        )
        if not math.isfinite(self.merged.explained):
            yield f"the merge is useless: its outputs on {self.source} probes are not finite"
        elif (self.merged.decisions, self.merged.explained + NOTICEABLE) < best.rank:
            yield f"the merge is predicted to be worse than client {self.best_client}: {compared}"
        elif self._may_be_worse:
            doubt = (
                "so few probes can't tell" if self._is_real else "made-up probes flatter a merge"
            )
            yield f"the merge may be worse than client {self.best_client} ({doubt}): {compared}"
        elif self.alike is not None and self.alike < ALIKE and self.source != "noise":
            yield (
                f"the merge may be worse than the best client: two clients decide alike on only "
                f"{percent(self.alike)} of the probes, and whether their ensemble is better than "
                "the best of them can't be told without labels"
            )
        for name in self.outliers:
            yield (
                f"client {name} answers unlike the others (untrained, diverged or of another "
                "task?): leave it out with --drop-outliers"
            )
        for name in self.dropped:
            yield f"client {name} was left out: it answers unlike the others"
