"""One price for all new units: many small problems instead of one with many equal columns.

The score of m new units is F(m) + c_1 + … + c_m, with F concave and c falling. Offer every row to
be new at the same price p: if the best assignment then has m new units and c_{m+1} ≤ p ≤ c_m, it
is the best one at the true rewards too, for no other number of new units gains more by c than by
p. More new units than p pays for mean that p is too high, fewer that it is too low. Where no more
than M may be new and the best assignment at p ≤ c_M has just M, it is the best one too: fewer would
gain less by c than by p. Equal columns, which delay a solver, are never built.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedmerge.matching.solvers import solve_priced
from fedmerge.types.arrays import Float64Array, IntArray

MAX_TRIES = 24  # then the caller builds the columns; changes the time only


@dataclass(frozen=True)
class Trial:
    """A price and the number of units that would be new at it, as a price of their own."""

    price: float
    fitting: float  # in the middle of the prices at which so many are new in truth

    @property
    def excess(self) -> float:
        """Return by how much the price is too high; it rises with the price."""
        return self.price - self.fitting


def solve_at_price(existing: Float64Array, new: Float64Array, *, likely: int) -> IntArray | None:
    """Return (rows,) best columns of (rows, columns), -1 for new; None where no price is found.

    `new` holds the rewards of the first, second, … new unit, and `likely` a guess of their number.
    """
    costs = -existing  # what the solver minimises
    low, high = -math.inf, math.inf
    trials: list[Trial] = []
    price = _fitting_price(new, min(likely, len(new)))
    for _ in range(MAX_TRIES):
        found = solve_priced(costs, price)
        added = int(np.count_nonzero(found < 0))
        if added > len(new):
            return _solve_at_cap(costs, len(new), min(price, float(new[-1])))
        floor = new[added] if added < len(new) else -math.inf
        ceiling = new[added - 1] if added else math.inf
        if floor <= price <= ceiling:
            return found
        if price > ceiling:
            low, high = max(low, floor), price
        else:
            low, high = price, min(high, ceiling)
        trials.append(Trial(price, _fitting_price(new, added)))
        price = _next_price(trials, low, high)
    return None


def _solve_at_cap(costs: Float64Array, most: int, high: float) -> IntArray | None:
    """Return (rows,) best columns at a price of at most `high` at which just `most` rows are new.

    The number of new rows rises with the price, from none at the lowest reward of all.
    """
    low, price = -float(costs.max()), high
    for _ in range(MAX_TRIES):
        found = solve_priced(costs, price)
        added = int(np.count_nonzero(found < 0))
        if added == most:
            return found
        if added > most:
            high = price
        elif price == high:
            return None  # the cap does not bind
        else:
            low = price
        price = (low + high) / 2
    return None


def _fitting_price(new: Float64Array, added: int) -> float:
    """Return a price at which so many new units are consistent with their rewards."""
    if added == 0:
        return float(new[0]) + 1
    if added == len(new):
        return float(new[-1]) - 1
    return float(new[added - 1] + new[added]) / 2


def _next_price(trials: list[Trial], low: float, high: float) -> float:
    """Return where the line through the last two trials meets zero excess, or a safe middle."""
    last = trials[-1]
    price = (last.price + last.fitting) / 2
    if len(trials) > 1 and last.price != trials[-2].price:
        slope = (last.excess - trials[-2].excess) / (last.price - trials[-2].price)
        price = last.price - last.excess / max(slope, 1.0)
    if low < price < high:
        return price
    return (low + high) / 2 if math.isfinite(low + high) else price
