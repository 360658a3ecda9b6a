"""The floor watches a matching without changing it, and counts what it does."""

import numpy as np

from benchmarks.cases import Case, labels, run
from benchmarks.floor import Floor, _touched, product_cost
from benchmarks.matching import measure, memory_needed
from benchmarks.measure import Cost

COPIES = Case("LeNet-5", "copies", 3)
INDEPENDENT = Case("LeNet-5", "independent", 3)
GROUPS = 4


def watched(case: Case) -> tuple[Floor, dict[str, list[int]]]:
    floor = Floor(repeats=1)
    with floor.watching():
        return floor, labels(run(case.problem()))


def test_watching_does_not_change_the_matching() -> None:
    for case in (COPIES, INDEPENDENT):
        assert watched(case)[1] == labels(run(case.problem()))


def test_copies_take_two_steps_per_client_but_the_first_and_last() -> None:
    floor, _ = watched(COPIES)
    # Two clients join the first; in the sweep the last one placed sees nothing new.
    assert floor.steps == GROUPS * (2 + 2)
    assert floor.renewed == floor.products  # all others moved since each visit
    assert floor.total == floor.products + floor.solver
    assert floor.total.wall > floor.products.wall > 0


def test_only_global_units_that_others_changed_are_renewed() -> None:
    before = [np.array([0, 1, 2]), np.array([0, 1, 3]), np.array([4])]
    now = [np.array([0, 2, 1]), np.array([0, 3, 1]), np.array([4])]
    assert set(_touched(before, now, 0).tolist()) == {1, 3}
    assert set(_touched(before, now, 1).tolist()) == {1, 2}
    assert _touched(before, before, 0).tolist() == []


def test_an_empty_product_costs_nothing() -> None:
    assert product_cost(4, 0, 4, 1) == Cost()
    assert product_cost(64, 64, 64, 1).wall > 0


def test_a_case_reports_its_time_and_its_floor() -> None:
    measured = measure("LeNet-5", "copies", 3, rounds=1)
    assert measured["steps"] == GROUPS * (2 + 2)
    assert 0 < measured["products_wall"] < measured["floor_wall"]
    assert measured["own_wall"] > 0


def test_memory_grows_with_the_clients_squared_where_nothing_matches() -> None:
    few, many = (memory_needed(Case("VGG-9", "nothing matches", n)) for n in (16, 32))
    assert 3.9 < many / few < 4.1
    few, many = (memory_needed(Case("VGG-9", "copies", n)) for n in (16, 32))
    assert many / few < 2
