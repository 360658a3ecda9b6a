"""Clients that answer unlike the others: untrained, diverged or of another task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmerge.types.arrays import IntArray
from fedmerge.workflow.oneshot.agreement import decisions_of

OUTLYING = 0.5  # of the median client's likeness to the others: below it a client is an outlier
CHANCE = 2.0  # deviations of a likeness over so many rows
FEWEST = 3  # clients, of which one can be told to be unlike the others
FEWEST_OTHERS = 2  # that a client has to be compared with: of two that differ, either may be odd
FEWEST_CLASSES = 2  # that two clients have to decide between
FEWEST_ROWS = 10  # on which two clients can be compared


@dataclass(frozen=True)
class Likeness:
    """How far two clients decide alike beyond chance (Cohen's kappa: 1 at best, 0 by chance)."""

    kappa: float
    rows: int  # that were compared


def likeness(one: Tensor, other: Tensor) -> Likeness | None:
    """Compare two clients' outputs (rows, outputs); None where these say nothing of each other.

    Clients with classes of their own decide for different ones, and both may be right. So they are
    compared where both decide for classes that both know: those that each of them decides for
    somewhere. A client that always decides for the same class knows nothing.
    """
    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        return Likeness(0.0, len(one))
    first, second = decisions_of(one).numpy(), decisions_of(other).numpy()
    if min(len(np.unique(first)), len(np.unique(second))) == 1:
        return Likeness(float(np.array_equal(first, second)), len(one))
    common = np.intersect1d(first, second)
    rows = np.isin(first, common) & np.isin(second, common)
    if len(common) < FEWEST_CLASSES or rows.sum() < FEWEST_ROWS:
        return None
    return Likeness(_kappa(first[rows], second[rows], common), int(rows.sum()))


def _kappa(first: IntArray, second: IntArray, classes: IntArray) -> float:
    """Return (agreement - chance) / (1 - chance), chance from how often each class is decided."""
    agreed = float(np.mean(first == second))
    chance = sum(float(np.mean(first == c) * np.mean(second == c)) for c in classes)
    return (agreed - chance) / (1 - chance) if chance < 1 else 1.0


def outliers(answers: Sequence[Tensor]) -> list[int]:
    """Return the clients that are far less like the others than the median client is.

    Each client is compared with every other one, not with their mean, which a single diverged
    client would decide; what so few rows may show by chance does not count.
    """
    return outlying(
        [[likeness(own, other) for other in answers if other is not own] for own in answers]
    )


def outlying(table: Sequence[Sequence[Likeness | None]]) -> list[int]:
    """Return the outliers of each client's likeness to the others; None says nothing."""
    known = {k: [own for own in row if own is not None] for k, row in enumerate(table)}
    each = {
        k: _middle([own.kappa for own in row])
        for k, row in known.items()
        if len(row) >= FEWEST_OTHERS
    }
    if len(each) < FEWEST:
        return []
    limit = OUTLYING * max(0.0, float(np.median(list(each.values()))))
    rows = {k: float(np.median([own.rows for own in known[k]])) for k in each}
    return [
        k
        for k, own in each.items()
        if own < limit - CHANCE * np.sqrt(limit * (1 - limit) / rows[k])
    ]


def _middle(kappas: Sequence[float]) -> float:
    """Return the median, of two middle ones the larger: an odd one out spoils no client's."""
    return sorted(kappas)[len(kappas) // 2]
