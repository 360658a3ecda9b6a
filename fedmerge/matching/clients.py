"""A client's units as the search sees them: their norms, and which need float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedmerge.matching.rows import row_squares
from fedmerge.matching.values import UnitFeatures
from fedmerge.types.arrays import BoolArray, Float64Array, FloatArray


@dataclass(frozen=True)
class ClientUnits:
    """One client's units with what every visit needs to know about them."""

    features: UnitFeatures
    squares: Float64Array  # (units,), |w|² with tie-breakers
    total: float  # sum of |w|² without tie-breakers
    exact: BoolArray  # (units,), whose products need float64


def client_units(features: UnitFeatures, *, exact: bool) -> ClientUnits:
    """Return a client's units, all to be multiplied in float64 if `exact` or float64 already."""
    squares = features.squares + row_squares(features.ties)
    if exact or any(part.dtype == np.float64 for _, part in feature_parts(features)):
        sensitive = np.ones(features.count, dtype=np.bool_)
    else:
        sensitive = features.twins
    return ClientUnits(features, squares, float(features.squares.sum()), sensitive)


def feature_parts(features: UnitFeatures) -> Iterator[tuple[slice, FloatArray]]:
    """Yield (place in the joined features, (units, part) view) of weights, then of ties if any."""
    split = features.weights.shape[1]
    yield slice(0, split), features.weights
    if features.ties.shape[1]:
        yield slice(split, features.length), features.ties
