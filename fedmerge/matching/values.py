"""What goes into a matching and what comes out of it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from fedmerge.matching.rows import row_squares
from fedmerge.matching.twins import near_twins
from fedmerge.types.arrays import BoolArray, Float64Array, FloatArray
from fedmerge.types.assignments import Assignment

SolverName: TypeAlias = Literal["auto", "scipy", "lapjv", "lapsolver"]


@dataclass(frozen=True)
class UnitFeatures:
    """One client's units of one group."""

    weights: FloatArray  # (units, features), float32 or float64
    ties: FloatArray  # (units, tie features), scaled tie-breakers; may have no columns

    def __post_init__(self) -> None:
        assert self.weights.ndim == self.ties.ndim == 2
        assert len(self.weights) == len(self.ties), "weights and ties of different units"

    @property
    def count(self) -> int:
        """How many units the client has."""
        return len(self.weights)

    @property
    def length(self) -> int:
        """How many numbers describe one unit, tie-breakers included."""
        return int(self.weights.shape[1] + self.ties.shape[1])

    @cached_property
    def twins(self) -> BoolArray:
        """Which units' weights (units,) resemble another one's: where tie-breakers decide."""
        return near_twins(self.weights, self.squares)

    @cached_property
    def squares(self) -> Float64Array:
        """The squared norms (units,) of the units' weights."""
        return row_squares(self.weights)


@dataclass(frozen=True)
class Prior:
    """Beta-Bernoulli process prior of mean 0; sigma and sigma0 are variances."""

    sigma: float  # of a client's unit about its global unit
    sigma0: float  # of a global unit about 0
    gamma: float = 1.0  # mass of the process: how readily new units appear
    popularity_weight: float = 2.0  # the paper's code uses 1
    popularity_clip: int | None = None  # the paper's code clips counts at 10

    def __post_init__(self) -> None:
        assert self.sigma > 0, "no spread at all: keep the units apart instead"
        assert self.sigma0 > 0
        assert self.gamma > 0
        assert self.popularity_clip is None or self.popularity_clip > 0


def prior_at_threshold(threshold: float, second_moment: float, *, gamma: float) -> Prior:
    """Return the prior under which two units of equal norm pair up above this cosine.

    sigma0 = t·V and sigma = (1 - t)·V with V the features' second moment about 0; features that
    are all 0 have no scale, so V = 1 there.
    """
    assert 0 < threshold < 1
    scale = second_moment if second_moment > 0 else 1.0
    return Prior(sigma=(1 - threshold) * scale, sigma0=threshold * scale, gamma=gamma)


@dataclass(frozen=True)
class SearchOptions:
    """How long and with what the best assignments are looked for."""

    sweeps: int = 20  # at most so many after every client was placed once
    solver: SolverName = "auto"
    min_gain: float = 1e-9  # relative rise of the score that a change must bring
    unit_cap: int | None = None  # the paper's code stops adding units at 700
    keep: int = 1 << 28  # bytes of rewards kept between visits; changes the time only
    device: str = "cpu"  # where matrix products run, as torch names it


@dataclass(frozen=True)
class Shortcuts:
    """Exact savings of the search, switchable to be tested and measured one by one."""

    reuse: bool = True  # keep products between visits, renew those of changed units
    skip: bool = True  # pass over a client for whom nothing changed
    bound: bool = True  # and over one whom bounds prove to be where it is best
    prune: bool = True  # leave out rows and columns that no optimum matches
    reduce: bool = True  # offer only as many new units as can be used
    price: bool = True  # offer new units at one price, not as columns
    greedy: bool = True  # no solver where every row's favourite is its own
    stop: bool = True  # end the search after a sweep that changes nothing


class TooWide(Exception):  # noqa: N818, how a search ends that nobody wants the result of
    """The global units of a search became more than any use of them allows."""


@dataclass(frozen=True)
class GroupMatching:
    """Where every client's units of one group went."""

    assignments: tuple[Assignment, ...]  # in the clients' given order
    width: int  # global units
    sweeps: int  # that were run
    scatter: float  # sum of |w - mean of its global unit|² over sum of |w|², without tie-breakers
    similarities: tuple[Float64Array, ...] = ()  # (units,) cosine with the fellow owners' mean
    threshold: float | None = None  # the cosine above which units pair up, if one was set

    @property
    def match_rate(self) -> float:
        """Share of the clients' units whose global unit has at least two members."""
        homes = np.concatenate([a.indices for a in self.assignments])
        if not len(homes):
            return 0.0
        members = np.bincount(homes, minlength=self.width)
        return float(np.mean(members[homes] >= 2))
