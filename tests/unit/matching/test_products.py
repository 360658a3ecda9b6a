"""Products in mixed precision."""

import numpy as np
import pytest

from fedmerge.matching import (
    ClientUnits,
    UnitFeatures,
    client_units,
    products_with_others,
    scores,
)
from fedmerge.matching import (
    scores as matchings,
)
from fedmerge.values import Float64Array, IntArray
from tests.unit.matching.cases import features

RNG = np.random.default_rng(0)
EXACT, ROUGH = 1e-13, 1e-5  # relative to the norms: float64, float32 with a few thousand features


def plain_products(
    units: UnitFeatures, sums: Float64Array, columns: IntArray, own: IntArray
) -> tuple[Float64Array, Float64Array]:
    joined = np.hstack([units.weights, units.ties]).astype(np.float64)
    others = sums[columns].copy()
    for column, unit in enumerate(own.tolist()):
        if unit >= 0:
            others[column] -= joined[unit]
    return joined @ others.T, (others**2).sum(axis=1)


def run(units: ClientUnits, sums: Float64Array, device: str = "cpu") -> tuple[float, float]:
    """Return the relative errors of the inner products and of the squares."""
    columns = np.array([4, 0, 2])
    own = np.array([-1, 3, 0])
    exact = np.zeros(3, dtype=np.bool_)
    found = products_with_others(units, sums, own, columns=columns, exact=exact, device=device)
    inner, squares = plain_products(units.features, sums, columns, own)
    scale = np.sqrt(np.outer(units.squares, squares))
    return (
        float(np.abs((found.inner - inner) / scale).max()),
        float(np.abs(found.squares / squares - 1).max()),
    )


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])  # "cpu:0" takes torch's way
@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, EXACT), (np.float32, ROUGH)])
def test_products_leave_out_the_clients_own_members(
    dtype: type[np.floating], bound: float, device: str
) -> None:
    units = UnitFeatures(
        RNG.standard_normal((6, 3000)).astype(dtype), RNG.standard_normal((6, 5)).astype(dtype)
    )
    inner, squares = run(client_units(units, exact=False), RNG.standard_normal((5, 3005)), device)
    assert inner < bound
    assert squares < EXACT


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_products_do_not_depend_on_the_size_of_chunks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matchings, "NUMBERS_PER_CHUNK", chunk)
    monkeypatch.setattr(scores, "FEATURES_PER_PRODUCT", max(1, chunk // 2))
    units = client_units(features(RNG.standard_normal((6, 40))), exact=False)
    assert max(run(units, RNG.standard_normal((5, 40)))) < EXACT


def test_exact_rows_and_columns_are_multiplied_in_float64() -> None:
    weights = RNG.standard_normal((6, 4000)).astype(np.float32)
    sums = RNG.standard_normal((4, 4000))
    exact_left, exact_right = np.zeros(6, np.bool_), np.zeros(4, np.bool_)
    exact_left[1], exact_right[2] = True, True
    found = scores.multiply(
        weights, sums, exact_left=exact_left, exact_right=exact_right, device="cpu"
    )
    error = np.abs(found - weights.astype(np.float64) @ sums.T)
    marked = exact_left[:, None] | exact_right
    assert error[marked].max() < 1e-10
    assert error[~marked].max() > 1e-10  # the control: the others are float32


def test_near_twins_and_only_they_are_exact() -> None:
    weights = RNG.standard_normal((200, 300)).astype(np.float32)
    weights[17] = weights[90] * np.float32(1.001)
    weights[[40, 41]] = 0
    weights[60] *= np.float32(1e-15)
    assert np.flatnonzero(client_units(features(weights), exact=False).exact).tolist() == [
        *(17, 40, 41, 60, 90),
    ]


def test_units_that_tie_breakers_alone_tell_apart_are_exact() -> None:
    weights = np.zeros((50, 3), np.float32)
    ties = RNG.standard_normal((50, 100)).astype(np.float32)
    assert client_units(UnitFeatures(weights, ties), exact=False).exact.all()
    assert not client_units(UnitFeatures(ties, weights), exact=False).exact.any()


def test_float64_units_are_exact() -> None:
    weights = RNG.standard_normal((5, 9))
    assert client_units(features(weights), exact=False).exact.all()
    assert not client_units(features(weights.astype(np.float32)), exact=False).exact.any()
    assert client_units(features(weights.astype(np.float32)), exact=True).exact.all()
