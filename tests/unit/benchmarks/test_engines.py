"""The benchmark of engines tells their rounds apart from their start."""

from benchmarks.engines import PARTS, measure


def test_a_worker_that_has_to_start_makes_the_first_round_the_longest() -> None:
    found = measure("processes", clients=2, samples=16, rounds=4)
    assert set(found) == set(PARTS)
    assert found["first"] > found["round"] > found["outside"] > 0
