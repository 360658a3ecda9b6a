"""What holds for every matching."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmerge.matching import (
    Prior,
    SearchOptions,
    Shortcuts,
    StepProblem,
    best_step,
    client_units,
    existing_rewards,
    match_units,
    new_rewards,
    prior_at_threshold,
    products_with_others,
)
from tests.unit.matching.cases import (
    NO_SHORTCUTS,
    brute_force_score,
    features,
    indices,
    is_sound,
    match_at,
    permuted_copies,
    plain_reward,
    random_clients,
    step_score,
)

seeds = st.integers(0, 2**32 - 1)
positive = st.floats(0.05, 20)
priors = st.builds(
    Prior,
    sigma=positive,
    sigma0=positive,
    gamma=positive,
    popularity_weight=st.sampled_from([1.0, 2.0]),
    popularity_clip=st.sampled_from([None, 2, 10]),
)
exact_shortcuts = st.builds(
    Shortcuts,
    reuse=st.booleans(),
    skip=st.booleans(),
    bound=st.booleans(),
    prune=st.booleans(),
    reduce=st.booleans(),
    price=st.booleans(),
    greedy=st.booleans(),
)


@given(seed=seeds, prior=priors, clients=st.integers(2, 14), length=st.integers(0, 9))
def test_fast_rewards_are_the_plain_ones(
    seed: int, prior: Prior, clients: int, length: int
) -> None:
    rng = np.random.default_rng(seed)
    units = client_units(features(rng.standard_normal((4, length))), exact=False)
    groups = [rng.standard_normal((int(rng.integers(1, clients)), length)) for _ in range(5)]
    counts = np.array([len(group) for group in groups])
    sums = np.array([group.sum(axis=0) for group in groups])
    own = np.array([-1, 2, -1, 0, 1])  # the client's own members are in the sums, not in the groups
    sums[own >= 0] += units.features.weights[own[own >= 0]]
    products = products_with_others(
        units, sums, own, columns=np.arange(5), exact=np.ones(5, np.bool_), device="cpu"
    )
    found = existing_rewards(products, units.squares, counts, clients, prior)
    for row, unit in enumerate(units.features.weights):
        for column, group in enumerate(groups):
            plain = plain_reward(unit, list(group), clients, prior)
            scale = 1 + (float(unit @ unit) + float((group**2).sum())) * clients / prior.sigma
            assert found[row, column] == pytest.approx(plain, abs=1e-12 * scale)


@given(clients=st.integers(1, 50), gamma=positive)
def test_new_units_pay_less_and_less(clients: int, gamma: float) -> None:
    found = new_rewards(4, clients, gamma).tolist()
    plain = [2 * math.log(gamma / clients) - 2 * math.log(k) for k in (1, 2, 3, 4)]
    assert found == pytest.approx(plain, abs=1e-12)


def step_problem(seed: int, units: int, columns: int, room: int, spread: float) -> StepProblem:
    rng = np.random.default_rng(seed)
    rewards = spread * rng.standard_normal((units, columns)) + rng.uniform(-9, 3)
    if rng.random() < 0.3:
        rewards = np.round(rewards)  # many optima
    new = new_rewards(units, int(rng.integers(2, 20)), float(rng.uniform(0.1, 20)))
    return StepProblem(rewards, new[: max(room, units - columns)])


@given(
    seed=seeds,
    units=st.integers(1, 4),
    columns=st.integers(0, 5),
    room=st.integers(0, 4),
    spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    shortcuts=exact_shortcuts,
)
def test_a_step_scores_as_brute_force(
    seed: int, units: int, columns: int, room: int, spread: float, shortcuts: Shortcuts
) -> None:
    problem = step_problem(seed, units, columns, room, spread)
    found = step_score(problem, best_step(problem, "auto", shortcuts))
    assert found == pytest.approx(brute_force_score(problem.existing, problem.new), abs=1e-9)


@settings(max_examples=8)
@given(seed=seeds, shortcuts=exact_shortcuts)
def test_a_step_of_six_units_scores_as_brute_force(seed: int, shortcuts: Shortcuts) -> None:
    problem = step_problem(seed, 6, 2, 6, 3.0)
    found = step_score(problem, best_step(problem, "auto", shortcuts))
    assert found == pytest.approx(brute_force_score(problem.existing, problem.new), abs=1e-9)


@given(
    seed=seeds,
    units=st.integers(1, 60),
    columns=st.integers(0, 90),
    room=st.integers(0, 60),
    spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    shortcuts=exact_shortcuts,
)
def test_fewer_columns_and_rows_score_as_all(
    seed: int, units: int, columns: int, room: int, spread: float, shortcuts: Shortcuts
) -> None:
    problem = step_problem(seed, units, columns, room, spread)
    full = step_score(problem, best_step(problem, "scipy", NO_SHORTCUTS))
    found = step_score(problem, best_step(problem, "auto", shortcuts))
    assert found == pytest.approx(full, abs=1e-9)


counts_of_clients = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(
    seed=seeds,
    counts=counts_of_clients,
    length=st.integers(0, 8),
    threshold=st.sampled_from([1e-3, 0.1, 0.5, 0.9, 0.999]),
    gamma=positive,
    room=st.integers(0, 12) | st.none(),
)
def test_assignments_are_injective_cover_every_unit_and_keep_the_limit(
    seed: int,
    counts: list[int],
    length: int,
    threshold: float,
    gamma: float,
    room: int | None,
) -> None:
    rng = np.random.default_rng(seed)
    clients = random_clients(counts, length, rng=rng)
    limit = None if room is None else max(counts) + room
    prior = prior_at_threshold(threshold, 1.0, gamma=gamma)
    matching = match_units(clients, prior, SearchOptions(), max_width=limit, rng=rng)
    assert is_sound(matching)
    assert max(counts) <= matching.width <= min(sum(counts), limit or sum(counts))
    widest = counts.index(max(counts))
    assert matching.assignments[widest].indices.tolist() == list(range(max(counts)))
    assert 0 <= matching.scatter <= 1


@given(
    seed=seeds,
    counts=counts_of_clients,
    prior=priors,
    noise=st.sampled_from([0.1, 0.5, 2.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
    room=st.integers(0, 12) | st.none(),
    shortcuts=exact_shortcuts,
)
def test_shortcuts_do_not_change_the_matching(
    seed: int,
    counts: list[int],
    prior: Prior,
    noise: float,
    dtype: type[np.floating],
    room: int | None,
    shortcuts: Shortcuts,
) -> None:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((max(counts), 6))
    clients = []
    for count in counts:
        chosen = base[rng.permutation(len(base))[:count]]
        noisy = chosen + noise * rng.standard_normal(chosen.shape)
        clients.append(features(noisy.astype(dtype)))
    limit = None if room is None else max(counts) + room
    results = [
        match_units(
            clients,
            prior,
            SearchOptions(sweeps=6),
            max_width=limit,
            rng=np.random.default_rng(seed),
            shortcuts=taken,
        )
        for taken in (Shortcuts(), shortcuts, NO_SHORTCUTS)
    ]
    assert indices(results[0]) == indices(results[1]) == indices(results[2])
    needs_sweeps = counts != [counts[0]] * 2
    assert not needs_sweeps or {result.sweeps for result in results} == {results[0].sweeps}


@given(
    seed=seeds,
    clients=st.integers(2, 16),
    units=st.integers(1, 12),
    dtype=st.sampled_from([np.float32, np.float64]),
    noise=st.sampled_from([0.0, 1e-3, 0.05]),
)
def test_permuted_copies_keep_their_width_and_order(
    seed: int, clients: int, units: int, dtype: type[np.floating], noise: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((units, 40)).astype(dtype)
    weights[rng.random(units) < 0.3] = 0
    ties = (1e-3 * rng.standard_normal((units, 40))).astype(dtype)
    copies, orders = permuted_copies(weights, ties, clients, rng=rng)
    noisy = [c.weights * (1 + noise * rng.standard_normal(c.weights.shape)) for c in copies]
    changed = [type(c)(w.astype(dtype), c.ties) for c, w in zip(copies, noisy, strict=True)]
    assert indices(match_at(changed, 0.5)) == [order.tolist() for order in orders]


@given(
    seed=seeds,
    threshold=st.floats(0.02, 0.98),
    offset=st.floats(-0.3, 0.3),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_a_pair_of_equal_norms_matches_iff_its_cosine_exceeds_the_threshold(
    seed: int, threshold: float, offset: float, scale: float
) -> None:
    # With 2 clients of one unit each and gamma 2 only the weights decide: the popularity term is
    # 2·log(1/(2-1)) = 0, and that of the first new unit 2·log(gamma/2) - 2·log 1 = 0.
    cosine = threshold + offset
    assume(abs(offset) > 1e-6)
    assume(-1 < cosine < 1)
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((8, 2)))
    first = scale * basis[:, 0]
    second = scale * (cosine * basis[:, 0] + math.sqrt(1 - cosine**2) * basis[:, 1])
    clients = [features(first[None]), features(second[None])]
    matching = match_at(clients, threshold, gamma=2.0)
    assert matching.width == (1 if offset > 0 else 2)


@settings(max_examples=20)
@given(seed=seeds, clients=st.integers(2, 5), length=st.integers(4, 20))
def test_a_lower_threshold_never_gives_a_wider_net(seed: int, clients: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    units = random_clients([12] * clients, length, rng=rng)
    thresholds = [0.95, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01]
    widths = [match_at(units, threshold).width for threshold in thresholds]
    assert widths == sorted(widths, reverse=True)
