import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedmerge.checkpoint import staging
from fedmerge.errors import TrainingError, UsageError
from fedmerge.training import (
    Parts,
    Preparation,
    Shard,
    read_shard,
    split_by_dirichlet,
    split_by_key,
    split_homogeneously,
    write_shards,
)

LABELS = np.random.default_rng(0).integers(0, 5, 1000)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


SPLITS: dict[str, Callable[[np.random.Generator], Parts]] = {
    "homogeneous": lambda rng: split_homogeneously(LABELS, 8, rng=rng),
    "dirichlet": lambda rng: split_by_dirichlet(LABELS, 8, 0.5, rng=rng),
    "key": lambda rng: split_by_key(LABELS * 2),
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_every_sample_is_in_exactly_one_shard(split: Callable[..., Parts]) -> None:
    rows = np.concatenate(list(split(rng()).values()))
    assert np.array_equal(np.sort(rows), np.arange(len(LABELS)))


@pytest.mark.parametrize("name", ["homogeneous", "dirichlet"])
def test_the_seed_decides(name: str) -> None:
    first, again = SPLITS[name](rng()), SPLITS[name](rng())
    other = SPLITS[name](np.random.default_rng(8))
    assert all(np.array_equal(first[client], again[client]) for client in first)
    assert not all(np.array_equal(first[client], other[client]) for client in first)


def test_homogeneous_shards_differ_by_at_most_one_in_size_and_classes() -> None:
    parts = split_homogeneously(LABELS, 7, rng=rng())
    counts = np.array([np.bincount(LABELS[rows], minlength=5) for rows in parts.values()])
    assert np.ptp(counts.sum(1)) <= 1
    assert np.ptp(counts, axis=0).max() <= 1
    assert list(parts) == [f"client-{number}" for number in range(1, 8)]


def test_sequences_can_be_split_homogeneously() -> None:
    parts = split_homogeneously(np.zeros((10, 4), int), 3, rng=rng())
    assert sorted(map(len, parts.values())) == [3, 3, 4]


def test_dirichlet_shares_are_those_of_the_draw() -> None:
    labels = np.repeat([3, 9], [400, 600])
    drawn = np.random.default_rng(7)
    expected = np.zeros((2, 4), int)
    for row, count in enumerate((400, 600)):
        drawn.permutation(count)
        cuts = (np.cumsum(drawn.dirichlet([0.5] * 4)) * count).astype(int)[:-1]
        expected[row] = np.diff([0, *cuts, count])
    parts = split_by_dirichlet(labels, 4, 0.5, rng=rng())
    found = [[int((labels[rows] == k).sum()) for rows in parts.values()] for k in (3, 9)]
    assert found == expected.tolist()


@pytest.mark.parametrize(("alpha", "is_skewed"), [(0.1, True), (1000.0, False)])
def test_a_small_alpha_skews_the_classes(alpha: float, is_skewed: bool) -> None:
    parts = split_by_dirichlet(LABELS, 4, alpha, rng=rng())
    shares = [np.bincount(LABELS[rows], minlength=5) / len(rows) for rows in parts.values()]
    assert (np.max(shares) > 0.5) == is_skewed


def test_proportions_are_drawn_again_until_nobody_has_too_little() -> None:
    parts = split_by_dirichlet(LABELS, 10, 0.1, rng=rng(), least=20)
    assert min(map(len, parts.values())) >= 20
    once = split_by_dirichlet(LABELS, 10, 0.1, rng=rng(), least=1)
    assert min(map(len, once.values())) < 20


@pytest.mark.parametrize(
    ("labels", "clients", "alpha", "least", "problem"),
    [
        (LABELS[:3], 4, 0.5, 1, "3 samples cannot be split among 4 clients"),
        (LABELS, 0, 0.5, 1, "among 0 clients"),
        (LABELS, 4, 0.0, 1, "`dirichlet` is 0.0, expected a positive number"),
    ],
)
def test_impossible_partitions_are_usage_errors(
    labels: np.ndarray, clients: int, alpha: float, least: int, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        split_by_dirichlet(labels, clients, alpha, rng=rng(), least=least)


def test_a_partition_that_never_succeeds_is_given_up() -> None:
    with pytest.raises(TrainingError, match=r"draws from Dir\(0.01\) left some of 20 clients"):
        split_by_dirichlet(LABELS[:100], 20, 0.01, rng=rng(), least=5)


def test_sequences_have_no_class_proportions() -> None:
    with pytest.raises(TrainingError, match=r"y is \(4, 2\) of int64, expected one class number"):
        split_by_dirichlet(np.zeros((4, 2), int), 2, 0.5, rng=rng())


def test_keys_become_file_names_of_their_own() -> None:
    keys = np.array(["King Lear", "king-lear", "../Fool", "King Lear", ""])
    parts = split_by_key(keys)
    assert {name: rows.tolist() for name, rows in parts.items()} == {
        "client": [4],
        "Fool": [2],
        "King-Lear": [0, 3],
        "king-lear-2": [1],
    }


def test_keys_must_be_one_per_sample() -> None:
    with pytest.raises(TrainingError, match=r"the key is \(2, 2\) of float64"):
        split_by_key(np.zeros((2, 2)))


def pixels() -> Shard:
    x = np.random.default_rng(1).integers(0, 256, (2500, 4, 4, 3), dtype=np.uint8)
    y = (np.arange(2500) % 3).astype(np.uint8)
    return Shard("data", x, y, Preparation((0.5,) * 3, (0.2, 0.3, 0.4), channels_last=True))


def test_written_shards_are_ready_for_a_model(tmp_path: Path) -> None:
    data = pixels()
    parts = split_by_dirichlet(data.y, 2, 0.5, rng=rng())
    with staging() as stage:
        paths = write_shards(tmp_path, data, parts, create=stage.create)
        assert not any(path.exists() for path in paths)
        stage.commit(force=False)
    assert [path.name for path in paths] == ["client-1.npz", "client-2.npz"]
    for path, rows in zip(paths, parts.values(), strict=True):
        shard = read_shard(path)
        assert np.array_equal(shard.x[:], data.preparation(data.x[rows]))
        assert np.array_equal(shard.y, data.y[rows])
        assert [str(shard.x.dtype), str(shard.y.dtype)] == ["float32", "int64"]


def test_the_same_rows_give_the_same_bytes() -> None:
    def written() -> bytes:
        file = io.BytesIO()
        write_shards(Path(), pixels(), {"c": np.arange(5)}, create=lambda path: file)
        return file.getvalue()

    assert written() == written()
