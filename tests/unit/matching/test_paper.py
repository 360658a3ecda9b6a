"""The paper's own step, transcribed in plain loops, against the search with the paper's dials."""

import math

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from fedmerge.errors import MatchingError
from fedmerge.matching import Prior, SearchOptions, UnitFeatures, match_units
from tests.unit.matching.cases import features, indices, is_sound, random_clients

PAPER = Prior(sigma=1.0, sigma0=1.0, gamma=7.0, popularity_weight=1.0, popularity_clip=10)
CAP = 700
SWEEPS = 5

Members = list[dict[int, int]]  # of each global unit: client → its unit


def reference_scores(
    weights: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]], client: int, units: Members
) -> list[list[float]]:
    """Return the scores of one client's units: existing columns, then new ones."""
    s, s0, count = 1 / PAPER.sigma, 1 / PAPER.sigma0, len(weights)
    new = min(len(weights[client]), max(CAP - len(units), 1))
    table = []
    for w in weights[client]:
        row = []
        for members in units:
            n = len(members)
            g = s * sum(weights[other][unit] for other, unit in members.items())
            c = min(n, 10)
            joined = float(((s * w + g) ** 2).sum()) / (s + s0 + n * s)
            row.append(joined - float((g**2).sum()) / (s0 + n * s) + math.log(c / (count - c)))
        for k in range(1, new + 1):
            alone = float(((s * w) ** 2).sum()) / (s + s0)
            row.append(alone + 2 * math.log(PAPER.gamma / count) - 2 * math.log(k))
        table.append(row)
    return table


def reference_step(
    weights: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]], client: int, units: Members
) -> Members:
    """Take a client out, drop emptied units and put it back where it scores most."""
    rest = [{j: u for j, u in members.items() if j != client} for members in units]
    rest = [members for members in rest if members]
    known = len(rest)
    _, columns = linear_sum_assignment(reference_scores(weights, client, rest), maximize=True)
    for unit, column in enumerate(columns.tolist()):
        if column < known:
            rest[column][client] = unit
        else:
            rest.append({client: unit})
    return rest


def reference_matching(
    weights: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]], seed: int
) -> list[list[int]]:
    """Run the whole schedule and number units by first owner in it."""
    rng = np.random.default_rng(seed)
    order = sorted(range(len(weights)), key=lambda client: -len(weights[client]))
    units: Members = [{order[0]: unit} for unit in range(len(weights[order[0]]))]
    for client in order[1:]:
        units = reference_step(weights, client, units)
    for _ in range(SWEEPS):
        for client in rng.permutation(len(weights)).tolist():
            units = reference_step(weights, client, units)
    units.sort(key=lambda members: min((order.index(j), u) for j, u in members.items()))
    found = [[-1] * len(w) for w in weights]
    for number, members in enumerate(units):
        for client, unit in members.items():
            found[client][unit] = number
    return found


def paper_matching(clients: list[UnitFeatures], seed: int, prior: Prior = PAPER) -> list[list[int]]:
    options = SearchOptions(sweeps=SWEEPS, unit_cap=CAP)
    rng = np.random.default_rng(seed)
    matching = match_units(clients, prior, options, max_width=None, rng=rng)
    assert is_sound(matching)
    return indices(matching)


def related_clients(counts: list[int], noise: float, seed: int) -> list[UnitFeatures]:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((max(counts), 7))
    return [
        features(base[rng.permutation(len(base))[:n]] + noise * rng.standard_normal((n, 7)))
        for n in counts
    ]


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize(
    "counts", [[6, 6], [5, 8, 3], [7, 7, 7, 7], [4, 6, 5, 6, 4, 6, 5, 6, 4, 6, 5, 6, 6]]
)
def test_the_search_repeats_the_papers_assignments(counts: list[int], noise: float) -> None:
    clients = related_clients(counts, noise, seed=len(counts))
    weights = [client.weights.astype(np.float64) for client in clients]
    assert paper_matching(clients, 5) == reference_matching(weights, 5)


@pytest.mark.parametrize(
    "prior",
    [
        Prior(sigma=1.0, sigma0=1.0, gamma=7.0, popularity_weight=1.0, popularity_clip=None),
        Prior(sigma=1.0, sigma0=1.0, gamma=7.0, popularity_weight=2.0, popularity_clip=10),
        Prior(sigma=1.0, sigma0=1.0, gamma=1.0, popularity_weight=1.0, popularity_clip=10),
    ],
)
def test_every_peculiarity_of_the_paper_shows_somewhere(prior: Prior) -> None:
    different = 0
    for seed in range(4):
        clients = related_clients([6] * 13, 1.0, seed)
        different += paper_matching(clients, seed) != paper_matching(clients, seed, prior)
    assert different > 0


def test_the_papers_cap_is_an_error_where_it_would_drop_units() -> None:
    clients = random_clients([9, 4, 4], 30, rng=np.random.default_rng(0))
    prior = Prior(sigma=0.5, sigma0=0.5)

    def run(cap: int) -> int:
        options = SearchOptions(unit_cap=cap)
        rng = np.random.default_rng(0)
        return match_units(clients, prior, options, max_width=None, rng=rng).width

    with pytest.raises(
        MatchingError, match="client of 9 units meets 7 global units, and the cap of 5 leaves"
    ) as caught:
        run(5)
    assert "raise the cap to 9" in caught.value.hint
    assert 9 <= run(9) <= 11
    assert run(700) == 16
