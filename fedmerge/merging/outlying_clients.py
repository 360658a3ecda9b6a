"""Clients that answer unlike the others: untrained, diverged or of another task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from fedmerge.merging.quality import decisions_of
from fedmerge.values.arrays import BoolArray, IntArray

OUTLYING = 0.5  # of the median client's likeness to the others: below it a client is an outlier
OUTLIER_DEVIATIONS = 2.0  # deviations of a likeness over so many rows
FEWEST = 3  # clients, of which one can be told to be unlike the others
FEWEST_OTHERS = 2  # that a client has to be compared with: of two that differ, either may be odd
FEWEST_CLASSES = 2  # that two clients have to decide between
FEWEST_ROWS = 10  # on which two clients can be compared


@dataclass(frozen=True)
class Likeness:
    """How far two clients decide alike beyond chance (Cohen's kappa: 1 at best, 0 by chance)."""

    kappa: float
    rows: int  # that were compared


@dataclass(frozen=True)
class Decided:
    """What a client decides for."""

    choices: IntArray  # (rows,)
    known: BoolArray  # (choices,), which it decides for anywhere
    is_finite: bool


def likeness(one: Tensor, other: Tensor) -> Likeness | None:
    """Compare two clients' outputs (rows, outputs); None where these say nothing of each other.

    Clients with classes of their own decide for different ones, and both may be right. So they are
    compared where both decide for classes that both know: those that each of them decides for
    somewhere. A client that always decides for the same class knows nothing.
    """
    return _likeness(*_decided([one, other]))


def _decided(answers: Sequence[Tensor]) -> list[Decided]:
    """Return the decisions of clients with outputs (rows, outputs), numbered as they occur."""
    finite = [bool(torch.isfinite(own).all()) for own in answers]
    each = np.stack([decisions_of(own).numpy() for own in answers])
    classes, numbers = np.unique(each, return_inverse=True)
    found = []
    for choices, is_finite in zip(numbers.reshape(each.shape), finite, strict=True):
        known = np.zeros(len(classes), dtype=np.bool_)
        known[choices] = True
        found.append(Decided(choices, known, is_finite))
    return found


def _likeness(one: Decided, other: Decided) -> Likeness | None:
    """Compare two clients in time that does not grow with the square of the classes."""
    if not (one.is_finite and other.is_finite):
        return Likeness(0.0, len(one.choices))
    if min(np.count_nonzero(one.known), np.count_nonzero(other.known)) == 1:
        return Likeness(float(np.array_equal(one.choices, other.choices)), len(one.choices))
    common = one.known & other.known
    rows = common[one.choices] & common[other.choices]
    if np.count_nonzero(common) < FEWEST_CLASSES or np.count_nonzero(rows) < FEWEST_ROWS:
        return None
    first, second = one.choices[rows], other.choices[rows]
    return Likeness(_kappa(first, second, len(common)), len(first))


def _kappa(first: IntArray, second: IntArray, classes: int) -> float:
    """Return (agreement - chance) / (1 - chance), chance from how often each class is decided."""
    agreed = np.count_nonzero(first == second) / len(first)
    often = (np.bincount(own, minlength=classes) / len(own) for own in (first, second))
    chance = float(np.dot(*often))
    return (agreed - chance) / (1 - chance) if chance < 1 else 1.0


def outliers(answers: Sequence[Tensor]) -> list[int]:
    """Return the clients that are far less like the others than the median client is.

    Each client is compared with every other one, not with their mean, which a single diverged
    client would decide; what so few rows may show by chance does not count.
    """
    decided = _decided(answers)
    pairs = {
        (j, k): _likeness(decided[j], decided[k]) for j, k in combinations(range(len(decided)), 2)
    }
    return outlying(
        [
            [pairs[min(j, k), max(j, k)] for j in range(len(decided)) if j != k]
            for k in range(len(decided))
        ]
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
        if own < limit - OUTLIER_DEVIATIONS * np.sqrt(limit * (1 - limit) / rows[k])
    ]


def _middle(kappas: Sequence[float]) -> float:
    """Return the median, of two middle ones the larger: an odd one out spoils no client's."""
    return sorted(kappas)[len(kappas) // 2]
