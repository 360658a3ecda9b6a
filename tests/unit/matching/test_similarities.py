"""How alike the owners of a global unit are."""

import numpy as np
import pytest

from fedmerge.matching import Prior, SearchOptions, UnitFeatures, keep_apart, match_units
from fedmerge.values import Array


def features(*clients: Array) -> list[UnitFeatures]:
    return [UnitFeatures(own, np.zeros((len(own), 0))) for own in clients]


def test_similarities_are_cosines_with_the_mean_of_the_fellow_owners() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(5, 7))
    clients = [base + 0.3 * rng.normal(size=base.shape) for _ in range(3)]
    found = match_units(
        features(*clients),
        Prior(0.5, 0.5),
        SearchOptions(),
        max_width=None,
        rng=np.random.default_rng(0),
    )
    for own, assignment, cosines in zip(
        clients, found.assignments, found.similarities, strict=True
    ):
        for unit, home in enumerate(assignment.indices):
            fellows = [
                other[where]
                for other, places in zip(clients, found.assignments, strict=True)
                if other is not own
                for where in np.flatnonzero(places.indices == home)
            ]
            assert fellows, "this seed shares every unit"
            mean = np.mean(fellows, axis=0)
            expected = own[unit] @ mean / np.linalg.norm(own[unit]) / np.linalg.norm(mean)
            assert cosines[unit] == pytest.approx(expected, abs=1e-9)


def test_a_unit_alone_has_no_similarity() -> None:
    one, other = np.array([[1.0, 0.0]]), np.array([[1.0, 0.1], [0.0, -5.0]])
    found = match_units(
        features(one, other),
        Prior(0.5, 0.5),
        SearchOptions(),
        max_width=None,
        rng=np.random.default_rng(0),
    )
    assert found.similarities[0][0] == pytest.approx(1 / np.sqrt(1.01))
    assert np.isnan(found.similarities[1]).tolist() == [False, True]


def test_units_that_are_kept_apart_were_not_compared() -> None:
    assert keep_apart([2, 3]).similarities == ()
