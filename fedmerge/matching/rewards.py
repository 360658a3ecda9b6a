"""The score of one step: what it is worth to join a global unit or to become a new one.

With s = 1/sigma, s0 = 1/sigma0, v = s·w, g = s · sum of the members, S = s0 + s·n, J clients and
the visited client taken out, BBP-MAP with prior mean 0 scores

    existing unit:  |v+g|²/(s+S) - |g|²/S + 2·log(n/(J-n))
    k-th new unit:  |v|²/(s+s0) + 2·log(gamma/J) - 2·log k

Everything here is relative to |v|²/(s+s0), which a unit earns either way: new units then reward
every row alike.
"""

import numpy as np

from fedmerge.matching.products import Products
from fedmerge.matching.rows import row_chunks
from fedmerge.matching.values import Prior
from fedmerge.types.arrays import Float64Array, IntArray


def base_scores(squares: Float64Array, prior: Prior) -> Float64Array:
    """Return (units,) what a unit with this |w|² scores by itself: |v|²/(s+s0)."""
    s, s0 = 1 / prior.sigma, 1 / prior.sigma0
    return squares * (s * s / (s + s0))


def new_rewards(count: int, clients: int, gamma: float) -> Float64Array:
    """Return (count,) rewards of the first, second, … new unit: 2·log(gamma/J) - 2·log k."""
    ranks = np.log(np.arange(1, count + 1), dtype=np.float64)
    rewards: Float64Array = 2 * np.log(gamma / clients) - 2 * ranks
    return rewards


def popularity(counts: IntArray, clients: int, prior: Prior) -> Float64Array:
    """Return (sums,) the reward for joining n members: weight · log(n/(J-n)), n perhaps clipped."""
    known = counts if prior.popularity_clip is None else np.minimum(counts, prior.popularity_clip)
    return prior.popularity_weight * np.log(known / (clients - known))


def existing_rewards(
    products: Products, squares: Float64Array, counts: IntArray, clients: int, prior: Prior
) -> Float64Array:
    """Return (units, sums) rewards of joining each sum of `counts` members.

    |v+g|²/(s+S) - |g|²/S - |v|²/(s+s0) + popularity
    = 2·v·g/(s+S) + |v|²·(1/(s+S) - 1/(s+s0)) + |g|²·(1/(s+S) - 1/S) + popularity
    """
    s, s0 = 1 / prior.sigma, 1 / prior.sigma0
    joined = 1 / (s + s0 + s * counts)
    alone = 1 / (s0 + s * counts)
    by_column = s * s * products.squares * (joined - alone) + popularity(counts, clients, prior)
    rewards = np.empty(products.inner.shape)
    for rows in row_chunks(len(squares), len(counts)):
        np.multiply.outer(s * s * squares[rows], joined - 1 / (s + s0), out=rewards[rows])
        rewards[rows] += products.inner[rows] * (2 * s * s * joined)
        rewards[rows] += by_column
    return rewards
