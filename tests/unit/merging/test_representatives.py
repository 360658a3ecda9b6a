"""Units that stand for all clients' units: which they are, and who joins them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedmerge.matching import UnitFeatures, represent
from fedmerge.merging import select_units
from fedmerge.probes import normalised
from fedmerge.values import Float64Array, FloatArray

NOISE = 0.02  # of `select_units`


def responses(units: int, seed: int, *, common: int = 4) -> FloatArray:
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(0).normal(size=(common, 800))
    mixed = rng.normal(size=(units, common)) @ shared + rng.normal(size=(units, 800))
    return normalised(mixed.astype(np.float32))


def correlations(*clients: FloatArray) -> Float64Array:
    every = np.concatenate(clients).astype(np.float64)
    return np.asarray(every @ every.T)


def lost(products: Float64Array, importance: Float64Array, kept: list[int]) -> float:
    """Return what is left unexplained by some units, by solving for them directly."""
    noisy = products + NOISE * np.eye(len(products))
    explained = noisy[:, kept] @ np.linalg.solve(noisy[np.ix_(kept, kept)], noisy[kept])
    return float(importance @ (noisy - explained).diagonal())


def features(*clients: FloatArray) -> list[UnitFeatures]:
    return [UnitFeatures(own, np.zeros((len(own), 0), np.float32)) for own in clients]


def test_losses_are_what_a_direct_solution_leaves() -> None:
    products = correlations(responses(5, 1), responses(4, 2))
    importance = np.random.default_rng(3).uniform(0.1, 2.0, size=9)
    selection = select_units(products, importance)
    assert sorted(selection.order.tolist()) == list(range(9))
    for count in range(10):
        wanted = lost(products, importance, selection.order[:count].tolist())
        assert selection.losses[count] == pytest.approx(wanted, abs=1e-9)
    assert (np.diff(selection.losses) < 0).all()


def test_no_single_unit_tells_more_than_the_first_and_few_pairs_more_than_two() -> None:
    products = correlations(responses(5, 1), responses(4, 2))
    importance = np.random.default_rng(4).uniform(0.1, 2.0, size=9)
    selection = select_units(products, importance)
    assert selection.losses[1] == pytest.approx(
        min(lost(products, importance, [unit]) for unit in range(9))
    )
    pairs = [lost(products, importance, list(p)) for p in itertools.combinations(range(9), 2)]
    assert sum(other < selection.losses[2] - 1e-12 for other in pairs) <= 3  # greedy, not the best


def test_importance_decides_between_units_that_tell_as_much() -> None:
    products = np.eye(4)
    for unit in range(4):
        importance = np.where(np.arange(4) == unit, 3.0, 1.0)
        assert select_units(products, importance).order[0] == unit


def test_copies_of_chosen_units_come_last_and_lose_nothing() -> None:
    one = responses(6, 1)
    selection = select_units(correlations(one, one[::-1]), np.ones(12))
    assert {unit if unit < 6 else 11 - unit for unit in selection.order[:6].tolist()} == {*range(6)}
    assert selection.losses[6] == 0
    assert selection.losses[5] > 0.1


def test_many_units_are_chosen_in_turns_that_lose_hardly_more() -> None:
    products = correlations(*(responses(100, seed, common=30) for seed in range(4)))
    importance = np.random.default_rng(5).uniform(0.1, 2.0, size=400)
    selection = select_units(products, importance)  # two at a time
    alone = [100, 200, 300]
    drawn = np.random.default_rng(6).permutation(400)
    for count in alone:
        assert selection.losses[count] < 0.9 * lost(products, importance, drawn[:count].tolist())
    assert len(set(selection.order.tolist())) == 400


def test_a_permuted_copy_joins_its_twins_and_another_net_does_not() -> None:
    one = responses(6, 1)
    moved = np.random.default_rng(7).permutation(6)
    order = select_units(correlations(one, one[moved]), np.ones(12)).order
    found = represent(features(one, one[moved]), order, 6, "scipy")
    first, second = (assignment.indices for assignment in found.assignments)
    assert second.tolist() == first[moved].tolist()
    assert found.match_rate == 1
    assert found.scatter == pytest.approx(0, abs=1e-9)
    other = responses(6, 2)
    order = select_units(correlations(one, other), np.ones(12)).order
    apart = represent(features(one, other), order, 12, "scipy")
    assert apart.match_rate == 0
    assert apart.scatter == 0
    assert represent(features(one, other), order, 6, "scipy").scatter > 0.5
    assert sorted(np.concatenate([a.indices for a in apart.assignments])) == list(range(12))


@pytest.mark.parametrize("width", [5, 7, 9])
def test_global_units_stand_for_one_of_their_owners_and_every_unit_has_its_own(width: int) -> None:
    clients = [responses(5, 1), responses(4, 2)]
    order = select_units(correlations(*clients), np.ones(9)).order
    found = represent(features(*clients), order, width, "scipy")
    assert found.width == len(found.leaders) == width
    starts = [0, 5]
    for client, assignment in enumerate(found.assignments):
        led = np.flatnonzero(np.array(found.leaders) == client)
        assert set(led.tolist()) <= set(assignment.indices.tolist())
        chosen = {int(unit) - starts[client] for unit in order[:width]}
        own = {k for k, unit in enumerate(assignment.indices) if int(unit) in led.tolist()}
        assert own == {k for k in chosen if 0 <= k < len(assignment.indices)}
    with pytest.raises(AssertionError, match="no client loses a unit"):
        represent(features(*clients), order, 4, "scipy")


def test_features_of_any_size_are_compared_by_their_direction() -> None:
    one = responses(3, 1)
    order = np.array([0, 1, 2, 3, 4, 5])
    loud = np.float32(1e30) * one[[2, 0, 1]]
    found = represent(features(one, loud), order, 3, "scipy")
    assert found.assignments[1].indices.tolist() == [2, 0, 1]
