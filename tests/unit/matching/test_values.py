"""The values that go in and out of a matching."""

import numpy as np
import pytest

from fedmerge.matching import GroupMatching, keep_apart, prior_at_threshold
from fedmerge.values import Assignment


def test_threshold_divides_the_second_moment_between_the_variances() -> None:
    prior = prior_at_threshold(0.3, 2.0, gamma=1.5)
    assert prior.sigma0 == pytest.approx(0.6)
    assert prior.sigma == pytest.approx(1.4)
    assert prior.gamma == 1.5


def test_zero_features_have_scale_one() -> None:
    prior = prior_at_threshold(0.25, 0.0, gamma=1.0)
    assert (prior.sigma, prior.sigma0) == (0.75, 0.25)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_ends_of_the_dial_have_no_prior(threshold: float) -> None:
    with pytest.raises(AssertionError):
        prior_at_threshold(threshold, 1.0, gamma=1.0)


def test_match_rate_is_the_share_of_units_that_are_not_alone() -> None:
    first = Assignment(np.array([0, 1]), 3)
    second = Assignment(np.array([1, 2]), 3)
    assert GroupMatching((first, second), 3, sweeps=1, scatter=0.0).match_rate == 0.5


def test_keeping_apart_puts_clients_side_by_side() -> None:
    matching = keep_apart([2, 1, 3])
    assert [a.indices.tolist() for a in matching.assignments] == [[0, 1], [2], [3, 4, 5]]
    assert (matching.width, matching.sweeps, matching.scatter) == (6, 0, 0.0)
    assert matching.match_rate == 0.0
    assert {a.width for a in matching.assignments} == {6}
