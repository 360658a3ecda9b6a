"""The slot array against sums over the members written out."""

import numpy as np

from fedmerge.matching import HOMELESS, Slots, client_units
from tests.unit.matching.cases import features, random_clients

RNG = np.random.default_rng(2)


def fresh_slots(counts: list[int], capacity: int) -> Slots:
    clients = [client_units(c, exact=False) for c in random_clients(counts, 5, rng=RNG)]
    return Slots(clients, capacity)


def assert_consistent(slots: Slots) -> None:
    sums, counts = np.zeros_like(slots.sums), np.zeros_like(slots.counts)
    for client, homes in zip(slots._clients, slots.homes, strict=True):
        for unit, home in enumerate(homes.tolist()):
            if home != HOMELESS:
                sums[home] += client.features.weights[unit]
                counts[home] += 1
    assert np.abs(slots.sums - sums).max() < 1e-12
    assert slots.counts.tolist() == counts.tolist()


def test_new_units_are_numbered_in_row_order() -> None:
    slots = fresh_slots([3], 3)
    slots.move(0, np.arange(3), np.full(3, HOMELESS), now=1)
    assert slots.homes[0].tolist() == [0, 1, 2]
    assert slots.changed.tolist() == [1, 1, 1]


def test_an_emptied_slot_is_exactly_zero_and_given_out_again() -> None:
    slots = fresh_slots([3, 2], 3)
    slots.move(0, np.arange(3), np.full(3, HOMELESS), now=1)
    slots.move(1, np.arange(2), np.array([2, HOMELESS]), now=2)
    assert slots.homes[1].tolist() == [2, 3]
    assert slots.capacity == 4
    slots.move(1, np.array([1]), np.array([0]), now=3)
    assert slots.sums[3].tolist() == [0.0] * 5
    assert slots.changed.tolist() == [3, 1, 2, 3]
    slots.move(0, np.array([0]), np.array([HOMELESS]), now=4)
    assert slots.homes[0].tolist() == [3, 1, 2]
    assert slots.capacity == 4
    assert_consistent(slots)


def test_sums_follow_any_moves() -> None:
    slots = fresh_slots([6, 4, 5], 6)
    for now in range(60):
        client = int(RNG.integers(3))
        count = len(slots.homes[client])
        taken = slots.homes[client]
        free = np.setdiff1d(np.flatnonzero(slots.counts), taken)
        placed = bool((taken != HOMELESS).all())
        moved = int(RNG.integers(1, count)) if placed else count
        units = np.sort(RNG.permutation(count)[:moved])
        targets = np.full(len(units), HOMELESS)
        chosen = RNG.permutation(free)[: len(units) // 2]
        targets[: len(chosen)] = chosen
        slots.move(client, units, targets, now=now)
        assert_consistent(slots)


def test_members_that_need_float64_are_counted() -> None:
    twins = features(np.ones((2, 4), np.float32))
    single = features(np.ones((1, 4), np.float32))
    slots = Slots([client_units(twins, exact=False), client_units(single, exact=False)], 2)
    slots.move(0, np.arange(2), np.full(2, HOMELESS), now=1)
    slots.move(1, np.arange(1), np.array([1]), now=2)
    assert slots.exact.tolist() == [1, 1]
    slots.move(0, np.array([1]), np.array([HOMELESS]), now=3)
    assert slots.exact.tolist() == [1, 0, 1]
