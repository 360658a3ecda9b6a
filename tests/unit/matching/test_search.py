"""The search over clients: known answers, shortcuts taken, refusals."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

from fedmerge.errors import MatchingError
from fedmerge.matching import (
    Prior,
    Products,
    SearchOptions,
    Shortcuts,
    Slots,
    UnitFeatures,
    match_units,
    prior_at_threshold,
    products_with_others,
    sweeps,
)
from tests.unit.matching.cases import (
    features,
    indices,
    is_sound,
    match_at,
    permuted_copies,
    random_clients,
)

DTYPES = [np.float32, np.float64]
UNITS = 24


def base_units(dtype: type[np.floating], *, rng: np.random.Generator) -> UnitFeatures:
    """Return units with distinct tie-breakers, a third of them zero and a third of them equal."""
    weights = rng.standard_normal((UNITS, 40))
    weights[: UNITS // 3] = 0
    weights[UNITS // 3 : 2 * UNITS // 3] = weights[UNITS // 3]
    ties = 1e-3 * np.sort(rng.standard_normal((UNITS, 30)), axis=1)
    return UnitFeatures(weights.astype(dtype), ties.astype(dtype))


@pytest.mark.parametrize("clients", [2, 3, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_permuted_copies_find_each_other(dtype: type[np.floating], clients: int) -> None:
    rng = np.random.default_rng(clients)
    weights = rng.standard_normal((UNITS, 30)).astype(dtype)
    copies, orders = permuted_copies(weights, np.zeros((UNITS, 0), dtype), clients, rng=rng)
    matching = match_at(copies, 0.5)
    assert matching.width == UNITS
    assert indices(matching) == [order.tolist() for order in orders]
    assert matching.sweeps == (0 if clients == 2 else 1)  # of two, one step finds the best
    assert matching.scatter == pytest.approx(0, abs=10 * float(np.finfo(dtype).eps))
    assert matching.match_rate == 1


@pytest.mark.parametrize("clients", [2, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_noisy_copies_find_each_other(dtype: type[np.floating], clients: int) -> None:
    rng = np.random.default_rng(clients)
    weights = rng.standard_normal((UNITS, 30))
    copies, orders = permuted_copies(weights, np.zeros((UNITS, 0)), clients, rng=rng)
    noisy = [features(c.weights + 0.1 * rng.standard_normal(c.weights.shape)) for c in copies]
    cast = [features(c.weights.astype(dtype)) for c in noisy]
    matching = match_at(cast, 0.5)
    assert indices(matching) == [order.tolist() for order in orders]
    assert 0.004 < matching.scatter < 0.01  # the noise's share: (1 - 1/clients)·0.01/1.01


@pytest.mark.parametrize("clients", [2, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_tell_zero_and_duplicate_units_apart(dtype: type[np.floating], clients: int) -> None:
    rng = np.random.default_rng(clients)
    base = base_units(dtype, rng=rng)
    copies, orders = permuted_copies(base.weights, base.ties, clients, rng=rng)
    truth = [order.tolist() for order in orders]
    assert indices(match_at(copies, 0.5)) == truth
    scrambled = match_at([features(copy.weights) for copy in copies], 0.5)
    assert scrambled.width == UNITS
    assert indices(scrambled) != truth  # the control: without ties they are mixed up


@pytest.mark.parametrize("length", [3000, 20000])
def test_float32_ties_are_resolved_among_many_features(length: int) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((UNITS, length)).astype(np.float32)
    weights[:8] = weights[0]
    # A thousandth of a norm: a millionth of the products.
    ties = rng.standard_normal((UNITS, 50)) * (1e-3 * np.sqrt(length / 50))
    copies, orders = permuted_copies(weights, ties.astype(np.float32), 6, rng=rng)
    assert indices(match_at(copies, 0.5)) == [order.tolist() for order in orders]


def test_copies_are_never_split_up_to_the_critical_gamma() -> None:
    rng = np.random.default_rng(0)
    clients = 4
    base = base_units(np.float64, rng=rng)
    copies, _ = permuted_copies(base.weights, base.ties, clients, rng=rng)
    critical = clients / (clients - 1)
    assert match_at(copies, 0.5, gamma=0.999 * critical).width == UNITS
    assert match_at(copies, 0.5, gamma=1.01 * critical).width > UNITS  # the control


def test_the_widest_client_keeps_its_numbering_wherever_it_stands() -> None:
    rng = np.random.default_rng(0)
    clients = random_clients([3, 1, 7, 5], 6, rng=rng)
    matching = match_at(clients, 0.3)
    assert matching.assignments[2].indices.tolist() == list(range(7))
    assert is_sound(matching)


def test_a_subset_of_units_is_found_in_a_wider_client() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((9, 20))
    chosen = np.array([7, 2, 4])
    matching = match_at([features(weights[chosen]), features(weights)], 0.5)
    assert indices(matching) == [[7, 2, 4], list(range(9))]


def test_independent_units_stay_apart_at_a_high_threshold() -> None:
    clients = random_clients([4, 6, 5], 50, rng=np.random.default_rng(0))
    matching = match_at(clients, 0.9)
    assert matching.width == 15
    assert matching.match_rate == 0
    assert matching.scatter == pytest.approx(0, abs=1e-12)
    assert indices(matching)[1] == list(range(6))


@pytest.mark.parametrize("shape", [(4, 0), (4, 5), (1, 3)])
def test_units_without_weights_are_matched_all_the_same(shape: tuple[int, int]) -> None:
    matching = (
        match_at([features(np.ones(shape) * 0)] * 3, 0.5)
        if shape[1]
        else match_units(
            [features(np.zeros(shape))] * 3,
            prior_at_threshold(0.5, 0.0, gamma=1.0),
            SearchOptions(),
            max_width=None,
            rng=np.random.default_rng(0),
        )
    )
    assert matching.width == shape[0]
    assert matching.scatter == 0
    assert is_sound(matching)


def test_one_client_alone_is_its_own_global_model() -> None:
    matching = match_at([features(np.eye(3))], 0.5)
    assert indices(matching) == [[0, 1, 2]]
    assert matching.scatter == 0


def test_clients_without_units_are_nothing_to_match() -> None:
    prior = Prior(sigma=1, sigma0=1)
    empty = [features(np.zeros((0, 4)))] * 2
    rng = np.random.default_rng(0)
    matching = match_units(empty, prior, SearchOptions(), max_width=0, rng=rng)
    assert (matching.width, matching.match_rate) == (0, 0.0)


def test_scatter_is_the_share_of_weights_that_averaging_loses() -> None:
    first, second = np.array([[3.0, 1.0], [0.0, 5.0]]), np.array([[3.0, -1.0], [1.0, 5.0]])
    matching = match_at([features(first), features(second)], 0.1)
    assert indices(matching) == [[0, 1], [0, 1]]
    # Halves of the squared differences: (0² + 2²)/2 and (1² + 0²)/2.
    assert matching.scatter == pytest.approx(2.5 / (10 + 25 + 10 + 26))


def test_tie_breakers_do_not_count_as_scatter() -> None:
    weights = np.eye(3)
    ties = 1e-3 * np.random.default_rng(0).standard_normal((2, 3, 4))
    matching = match_at([UnitFeatures(weights, ties[0]), UnitFeatures(weights, ties[1])], 0.5)
    assert matching.scatter == pytest.approx(0, abs=1e-12)


def test_the_same_seed_gives_the_same_matching() -> None:
    clients = random_clients([40, 37, 40, 39, 40, 40], 12, rng=np.random.default_rng(3))
    results = [indices(match_at(clients, 0.1, seed=seed)) for seed in (0, 0, 1, 2, 3)]
    assert results[0] == results[1]
    assert any(other != results[0] for other in results[2:])  # the seed does matter


def test_the_order_of_copies_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    base = base_units(np.float64, rng=rng)
    copies, orders = permuted_copies(base.weights, base.ties, 5, rng=rng)
    matching = match_at(copies[::-1], 0.5)
    # The last client came first, so its numbering is the global one.
    numbering = np.argsort(orders[-1])
    assert indices(matching) == [numbering[order].tolist() for order in orders[::-1]]


def test_exact_ties_do_not_cycle() -> None:
    clients = [features(np.ones((6, 4)))] * 5
    matching = match_at(clients, 0.5)
    assert (matching.width, matching.sweeps) == (6, 1)


def test_sweeps_are_limited() -> None:
    clients = random_clients([40] * 6, 12, rng=np.random.default_rng(3))
    prior = prior_at_threshold(0.1, 1.0, gamma=1.0)
    runs = [
        match_units(
            clients, prior, SearchOptions(sweeps=n), max_width=None, rng=np.random.default_rng(0)
        )
        for n in (0, 1, 20)
    ]
    assert [run.sweeps for run in runs[:2]] == [0, 1]
    assert 2 < runs[2].sweeps < 20
    assert indices(runs[0]) != indices(runs[2])


def test_a_revisit_multiplies_changed_columns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = products_with_others

    def recorded(*arguments: object, **options: object) -> Products:
        asked.append(len(options["columns"]))  # type: ignore[arg-type]
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sweeps, "products_with_others", recorded)
    clients = random_clients([40] * 6, 12, rng=np.random.default_rng(3))
    matching = match_at(clients, 0.1)
    assert asked[:5] == [40, 40, 40, 40, 40]
    assert len(asked) < 5 + 6 * matching.sweeps  # some visits were skipped altogether
    assert 0 < asked[-1] < 40


def noisy_copies(noise: float, *, rng: np.random.Generator) -> list[UnitFeatures]:
    """Return eight clients with the same units in different orders, and noise."""
    copies, _ = permuted_copies(rng.standard_normal((UNITS, 30)), np.zeros((UNITS, 0)), 8, rng=rng)
    return [features(c.weights + noise * rng.standard_normal(c.weights.shape)) for c in copies]


def test_bounds_spare_most_products_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(side_effect=products_with_others)
    monkeypatch.setattr(sweeps, "products_with_others", asked)
    clients = noisy_copies(0.1, rng=np.random.default_rng(0))
    prior = prior_at_threshold(0.5, 1.0, gamma=1.0)
    found, work = [], []
    for shortcuts in (Shortcuts(), Shortcuts(bound=False)):
        asked.reset_mock()
        rng = np.random.default_rng(0)
        matching = match_units(
            clients, prior, SearchOptions(), max_width=None, rng=rng, shortcuts=shortcuts
        )
        found.append(indices(matching))
        work.append(asked.call_count)
    assert found[0] == found[1]
    assert work == [7 + 1, 7 + 7]  # placed once; then only the first client needs a product


def test_bounds_that_forget_how_far_sums_moved_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def searched(seed: int, **shortcuts: bool) -> list[list[int]]:
        clients = noisy_copies(1.0, rng=np.random.default_rng(seed))
        prior = prior_at_threshold(0.05, 1.0, gamma=1e-6)
        rng = np.random.default_rng(0)
        taken = Shortcuts(**shortcuts)
        return indices(
            match_units(clients, prior, SearchOptions(), max_width=None, rng=rng, shortcuts=taken)
        )

    seeds = range(5)
    plain = [searched(seed, bound=False) for seed in seeds]
    assert [searched(seed) for seed in seeds] == plain
    change = Slots._change

    def forgetful(slots: Slots, *arguments: Any, **options: Any) -> None:
        change(slots, *arguments, **options)
        slots.travel[:] = 0

    monkeypatch.setattr(Slots, "_change", forgetful)
    assert [searched(seed) for seed in seeds] != plain


@pytest.mark.parametrize("max_width", [None, 40, 46])
def test_two_clients_of_equal_width_need_no_sweep(max_width: int | None) -> None:
    prior = prior_at_threshold(0.1, 1.0, gamma=1.0)
    for seed in range(10):
        clients = random_clients([40, 40], 12, rng=np.random.default_rng(seed))
        found = [
            match_units(
                clients,
                prior,
                SearchOptions(),
                max_width=max_width,
                rng=np.random.default_rng(seed),
                shortcuts=Shortcuts(pair=is_pair),
            )
            for is_pair in (True, False)
        ]
        assert [matching.sweeps for matching in found] == [0, 1]
        assert indices(found[0]) == indices(found[1])
        assert found[0].scatter == pytest.approx(found[1].scatter, rel=1e-9)
        for one, other in zip(*(matching.similarities for matching in found), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_three_clients_and_two_of_different_widths_are_swept() -> None:
    for counts in ([40, 40, 40], [40, 38]):
        clients = random_clients(counts, 12, rng=np.random.default_rng(0))
        assert match_at(clients, 0.1).sweeps > 0


def test_without_memory_the_matching_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = random_clients([40, 35, 40, 38], 12, rng=np.random.default_rng(3))
    prior = prior_at_threshold(0.2, 1.0, gamma=1.0)
    asked: list[int] = []

    def recorded(*arguments: object, **options: object) -> Products:
        asked.append(len(options["columns"]))  # type: ignore[arg-type]
        return products_with_others(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sweeps, "products_with_others", recorded)
    found, work = [], []
    for keep in (1 << 28, 50_000, 0):
        asked.clear()
        rng = np.random.default_rng(0)
        options = SearchOptions(keep=keep)
        found.append(indices(match_units(clients, prior, options, max_width=None, rng=rng)))
        work.append(sum(asked))
    assert found[0] == found[1] == found[2]
    assert work[0] <= work[1] <= work[2]
    assert work[0] < work[2]


def test_other_devices_give_the_same_matching() -> None:
    clients = random_clients([20, 15, 18], 12, rng=np.random.default_rng(3))
    prior = prior_at_threshold(0.2, 1.0, gamma=1.0)
    found = [
        match_units(
            clients,
            prior,
            SearchOptions(device=device),
            max_width=None,
            rng=np.random.default_rng(0),
        )
        for device in ("cpu", "cpu:0")  # the second takes torch's way
    ]
    assert indices(found[0]) == indices(found[1])


def test_no_group_grows_beyond_its_limit() -> None:
    clients = random_clients([6, 4, 5], 50, rng=np.random.default_rng(0))
    prior = prior_at_threshold(0.9, 1.0, gamma=1.0)
    for limit in (6, 7, 9, 15, 99):
        rng = np.random.default_rng(0)
        matching = match_units(clients, prior, SearchOptions(), max_width=limit, rng=rng)
        assert matching.width == min(limit, 15)
        assert is_sound(matching)


def test_a_limit_below_the_widest_client_is_refused() -> None:
    clients = random_clients([6, 4], 5, rng=np.random.default_rng(0))
    with pytest.raises(MatchingError, match="at most 5 cannot hold a client of 6 units") as caught:
        match_units(
            clients,
            Prior(sigma=1, sigma0=1),
            SearchOptions(),
            max_width=5,
            rng=np.random.default_rng(0),
        )
    assert "widest client" in caught.value.hint


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_weights_that_cannot_be_squared_are_refused(value: float) -> None:
    broken = np.ones((2, 3))
    broken[1, 2] = value
    with pytest.raises(MatchingError, match=r"client 2: .* not finite"):
        match_units(
            [features(np.ones((2, 3))), features(broken)],
            Prior(sigma=1, sigma0=1),
            SearchOptions(),
            max_width=None,
            rng=np.random.default_rng(0),
        )


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e18])
def test_float32_copies_of_any_magnitude_find_each_other(scale: float) -> None:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((UNITS, 30)) * scale).astype(np.float32)
    copies, orders = permuted_copies(weights, np.zeros((UNITS, 0), np.float32), 3, rng=rng)
    moment = float(np.mean(weights.astype(np.float64) ** 2))
    prior = prior_at_threshold(0.5, moment, gamma=1.0)
    matching = match_units(copies, prior, SearchOptions(), max_width=None, rng=rng)
    assert indices(matching) == [order.tolist() for order in orders]


def test_near_the_end_of_the_dial_float32_copies_still_match() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((UNITS, 3000)).astype(np.float32)
    copies, orders = permuted_copies(weights, np.zeros((UNITS, 0), np.float32), 4, rng=rng)
    matching = match_at(copies, 1 - 1e-7)
    assert indices(matching) == [order.tolist() for order in orders]
