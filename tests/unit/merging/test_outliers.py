"""Clients that answer unlike the others, and those that only have other classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmerge.merging import Likeness, likeness, outliers, outlying

ROWS, CLASSES = 400, 10


def deciding(decisions: Tensor) -> Tensor:
    """Return outputs (rows, classes) that decide as given."""
    return torch.nn.functional.one_hot(decisions, CLASSES).float()


def truth(seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, CLASSES, ROWS))


def client(classes: range | tuple[int, ...], seed: int, right: float = 0.9) -> Tensor:
    """Return outputs of a client that knows some classes and guesses one of them elsewhere."""
    rng = np.random.default_rng(seed)
    guesses = torch.from_numpy(rng.choice(list(classes), ROWS))
    is_known = torch.isin(truth(), torch.tensor(list(classes)))
    is_right = torch.from_numpy(rng.random(ROWS) < right) & is_known
    return deciding(torch.where(is_right, truth(), guesses))


ALL = range(CLASSES)


def test_likeness_is_what_is_beyond_chance() -> None:
    one, other = torch.tensor([0, 0, 0, 1] * 5), torch.tensor([0, 0, 1, 1] * 5)
    found = likeness(deciding(one), deciding(other))
    assert found is not None
    assert found.rows == 20
    assert found.kappa == pytest.approx((0.75 - 0.5) / 0.5)  # chance: 3/4 · 1/2 + 1/4 · 1/2
    same = likeness(deciding(one), deciding(one))
    assert same is not None
    assert same.kappa == pytest.approx(1.0)


def test_clients_without_common_classes_say_nothing_of_each_other() -> None:
    one, other = client(range(5), 1), client(range(5, 10), 2)
    assert likeness(one, other) is None
    assert likeness(one, client(range(4, 10), 2)) is None  # one class: they can't but agree
    assert likeness(one, client(range(3, 10), 2)) is not None


@pytest.mark.parametrize("clients", [3, 4, 8])
@pytest.mark.parametrize("kind", ["another task", "guesses", "one class", "no numbers"])
def test_a_client_that_is_like_nobody_is_an_outlier(kind: str, clients: int) -> None:
    odd = {
        "another task": deciding((truth() + 3) % CLASSES),
        "guesses": client(ALL, 99, right=0.0),
        "one class": deciding(torch.full((ROWS,), 4)),
        "no numbers": torch.full((ROWS, CLASSES), torch.nan),
    }
    good = [client(ALL, seed) for seed in range(clients)]
    assert outliers(good) == []
    assert outliers([*good[1:], odd[kind]]) == [clients - 1]


@pytest.mark.parametrize("classes", [(8, 9), (0, 1, 2), tuple(range(5))])
def test_a_client_with_few_classes_is_none(classes: tuple[int, ...]) -> None:
    good = [client(ALL, seed) for seed in range(3)]
    assert outliers([*good, client(classes, 7)]) == []
    strange = deciding((truth() + 3) % CLASSES)
    assert outliers([*good, client(classes, 7), strange]) == [4]


def test_a_client_that_is_compared_with_one_other_alone_is_none() -> None:
    apart = [client(range(4), 0), client(range(4, 7), 1), client(range(7, 10), 2)]
    assert outliers([*apart, deciding((truth() + 3) % CLASSES)]) == []


def table(good: float, odd: float, clients: int, rows: int) -> list[list[Likeness | None]]:
    """Return the likeness of each client to the others, the last one odd."""
    row: list[Likeness | None] = [*[Likeness(good, rows)] * (clients - 2), Likeness(odd, rows)]
    return [row] * (clients - 1) + [[Likeness(odd, rows)] * (clients - 1)]


def test_a_few_rows_prove_nothing() -> None:
    assert outlying(table(0.8, 0.3, 4, 1000)) == [3]
    assert outlying(table(0.8, 0.3, 4, 10)) == []
    assert outlying(table(0.3, 0.3, 4, 1000)) == []  # nobody is like another: nobody is odd


def test_of_two_clients_nobody_can_be_told() -> None:
    assert outliers([client(ALL, 0), deciding((truth() + 3) % CLASSES)]) == []
