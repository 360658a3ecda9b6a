"""The plain loops and fedmerge are two implementations of one mathematics: they agree."""

import numpy as np
import pytest

from benchmarks import plain
from fedmerge.matching import Prior, SearchOptions, UnitFeatures, match_units
from fedmerge.values import FloatArray

COUNTS = (7, 5, 9, 6)
PRIORS = {
    "few new units": Prior(sigma=0.9, sigma0=0.1),
    "many new units": Prior(sigma=0.4, sigma0=0.6),
    "the paper's": Prior(1.0, 1.0, gamma=7.0, popularity_weight=1.0, popularity_clip=2),
}


def noisy_units(noise: float, *, seed: int) -> list[UnitFeatures]:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((max(COUNTS), 12))
    found = []
    for count in COUNTS:
        chosen = base[rng.permutation(len(base))[:count]]
        weights: FloatArray = chosen + noise * rng.standard_normal(chosen.shape)
        found.append(UnitFeatures(weights, 1e-3 * rng.standard_normal((count, 4))))
    return found


@pytest.mark.parametrize("limit", [None, 9, 12])
@pytest.mark.parametrize("noise", [0.1, 0.7, 3.0])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_plain_loops_give_the_same_matching(prior: Prior, noise: float, limit: int | None) -> None:
    for seed in range(3):
        units = noisy_units(noise, seed=seed)
        ours, theirs = (
            match(units, prior, SearchOptions(), max_width=limit, rng=np.random.default_rng(seed))
            for match in (match_units, plain.match_units)
        )
        assert [a.indices.tolist() for a in ours.assignments] == [
            a.indices.tolist() for a in theirs.assignments
        ]
        assert (ours.width, ours.sweeps) == (theirs.width, theirs.sweeps)
        assert ours.scatter == pytest.approx(theirs.scatter, abs=1e-9)


def test_the_agreement_notices_another_prior() -> None:
    units = noisy_units(0.7, seed=0)
    widths = {
        name: plain.match_units(
            units, prior, SearchOptions(), max_width=None, rng=np.random.default_rng(0)
        ).width
        for name, prior in PRIORS.items()
    }
    assert widths["few new units"] < widths["many new units"]
