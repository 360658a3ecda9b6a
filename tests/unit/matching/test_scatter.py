"""Adding at mapped positions in blocks gives the very bits of the plain formula."""

import itertools
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from fedmerge.matching import add_mapped, features
from fedmerge.merging import Averaging, average_tensor
from fedmerge.values import (
    Array,
    Assignment,
    Float64Array,
    Group,
    IntArray,
    Pinned,
    Plan,
    Product,
    TensorInfo,
    TensorPlan,
    Units,
    index_map,
)

CASES = {  # sizes of the total and of the values
    "vector": ((9,), (7,)),
    "matrix": ((8, 6), (8, 6)),
    "growing": ((9, 12), (5, 7)),
    "convolution": ((6, 5, 3, 3), (4, 5, 3, 3)),
    "two middle axes": ((3, 6, 4, 2), (3, 4, 4, 2)),
    "empty": ((4, 0), (3, 0)),
    "no rows": ((0, 4), (0, 3)),
}


def maps_for(total: tuple[int, ...], values: tuple[int, ...], seed: int) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(size)[:count] for size, count in zip(total, values, strict=True)]


@pytest.mark.parametrize("block", [1, 10, 1 << 17])
@pytest.mark.parametrize("case", CASES)
def test_blocks_give_the_bits_of_the_plain_formula(
    case: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "BLOCK", block)
    shape, own = CASES[case]
    for seed, dtype in itertools.product(range(3), (np.float32, np.float64)):
        rng = np.random.default_rng(seed)
        values = rng.normal(size=own).astype(dtype)
        per_row = rng.uniform(size=(own[0], *[1] * (len(own) - 1)))
        per_last = rng.uniform(size=(*[1] * (len(own) - 1), own[-1]))
        maps = maps_for(shape, own, seed)
        for weights in (np.array(1.0), np.array(1 / 3), per_row, per_last):
            found = rng.normal(size=shape)
            expected = found.copy()
            expected[np.ix_(*maps)] += weights * np.asarray(values, dtype=np.float64)
            add_mapped(found, maps, values, weights)
            np.testing.assert_array_equal(found, expected)


def test_a_single_number_is_added() -> None:
    total = np.array(1.5)
    add_mapped(total, [], np.array(2.0), np.array(3.0))
    assert total == 7.5


def test_another_map_gives_another_sum() -> None:
    values = np.random.default_rng(0).normal(size=(5, 7))
    sums = []
    for seed in (0, 1):
        total = np.zeros((9, 12))
        add_mapped(total, maps_for((9, 12), (5, 7), seed), values, np.array(1.0))
        sums.append(total)
    assert (sums[0] != sums[1]).any()


@pytest.mark.parametrize(
    ("positions", "size", "expected"),
    [
        ([0, 1, 2], 3, None),
        ([4, 5, 0, 1], 6, [1, -1, 0]),  # runs of 2
        ([3, 4, 5, 0, 1, 2], 6, [1, 0]),  # of 3
        ([1, 2, 3], 4, [-1, 0, 1, 2]),  # shifted by less than a run
        ([0, 1, 2], 4, [0, 1, 2, -1]),
        ([2, 3, 0], 4, [2, -1, 0, 1]),  # of different lengths
    ],
)
def test_runs_are_as_long_as_they_can_be(
    positions: list[int], size: int, expected: list[int] | None
) -> None:
    found = features._runs(np.array(positions), size)
    assert (found if found is None else found.tolist()) == expected


@dataclass(frozen=True)
class FreshClient:
    """A client that, as one that reads a file, gives a new array at every read."""

    array: Array
    name: str = "client"
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {"w": TensorInfo(self.array.shape, "float32")}

    def read(self, name: str) -> Array:
        return np.array(self.array)


FLAT = TensorPlan((Units("h"), Product((Units("c"), Pinned(49)))))
PLAN = Plan(groups=(Group("c"), Group("h")), tensors={"w": FLAT})


def clients_of(h: int, c: int, count: int) -> tuple[list[FreshClient], list[dict[str, Assignment]]]:
    rng = np.random.default_rng(0)
    clients = [FreshClient(rng.normal(size=(h, 49 * c)).astype(np.float32)) for _ in range(count)]
    placements = [
        {"h": Assignment(rng.permutation(h + 3)[:h], h + 3), "c": Assignment(rng.permutation(c), c)}
        for _ in range(count)
    ]
    return clients, placements


def test_an_average_has_the_bits_of_the_plain_formula() -> None:
    clients, placements = clients_of(20, 6, 4)
    widths, weights = {"h": 23, "c": 6}, (1.0, 2.0, 0.1, 3.0)
    total: Float64Array = np.zeros((23, 49 * 6))
    owned = np.zeros(23)
    for client, placement, weight in zip(clients, placements, weights, strict=True):
        targets = {group: a.indices for group, a in placement.items()}
        maps = [index_map(layout, targets, widths) for layout in FLAT.axes]
        total[np.ix_(*maps)] += weight * client.array.astype(np.float64)
        owned[maps[0]] += weight
    expected = (total / np.where(owned > 0, owned, 1.0)[:, None]).astype(np.float32)
    found = average_tensor(
        "w", clients, PLAN, placements=placements, widths=widths, averaging=Averaging(weights)
    )
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_an_average_needs_the_sums_and_one_clients_tensor() -> None:
    clients, placements = clients_of(1000, 16, 4)
    tracemalloc.start()
    try:
        found = average_tensor(
            "w",
            clients,
            PLAN,
            placements=placements,
            widths={"h": 1003, "c": 16},
            averaging=Averaging((1.0, 2.0, 1.0, 1.0)),
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    blocks = 8 * 8 * features.BLOCK
    assert peak < 3 * found.nbytes + blocks  # float64 sums count twice
