import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmerge.errors import FedmergeError, TrainingError, UsageError
from fedmerge.federated import Partition, PartitionOptions, partition
from fedmerge.training import Preparation, read_shard
from tests.end_to_end.helpers import listing

SAMPLES, CLASSES = 120, 4


def data_set(folder: Path, **extra: Any) -> Path:
    """Write numbered samples, so that each can be found again."""
    rng = np.random.default_rng(0)
    x = np.arange(SAMPLES, dtype=np.float64)[:, None] * np.ones((1, 3))
    np.savez(folder / "data.npz", x=x, y=rng.integers(0, CLASSES, SAMPLES), **extra)
    return folder / "data.npz"


def split(folder: Path, data: Path | None = None, **options: Any) -> Partition:
    way = options or {"clients": 3, "homogeneous": True}
    return partition(data or data_set(folder), folder / "shards", PartitionOptions(**way))


SPLITS: dict[str, dict[str, Any]] = {
    "homogeneous": {"clients": 5, "homogeneous": True},
    "dirichlet": {"clients": 5, "dirichlet": 0.5, "seed": 1},
    "by": {"by": "who"},
}


@pytest.mark.parametrize("way", SPLITS.values(), ids=SPLITS)
def test_every_sample_is_in_one_shard_with_its_target(tmp_path: Path, way: dict[str, Any]) -> None:
    data = data_set(tmp_path, who=np.arange(SAMPLES) % 7)
    done = split(tmp_path, data, **way)
    y = np.load(data)["y"]
    seen = []
    for shard in done.shards:
        found = read_shard(shard.path)
        numbers = found.x[:][:, 0].astype(int)
        assert found.x.dtype == np.float32
        assert np.array_equal(found.y, y[numbers])
        assert shard.class_counts == tuple(np.bincount(y[numbers], minlength=CLASSES).tolist())
        assert shard.samples == len(numbers)
        seen += numbers.tolist()
    assert sorted(seen) == list(range(SAMPLES))
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == sorted(
        shard.path.name for shard in done.shards
    )


def test_homogeneous_shards_have_the_same_classes_and_skewed_ones_do_not(tmp_path: Path) -> None:
    def spread(done: Partition) -> int:
        counts = np.array([shard.class_counts for shard in done.shards])
        return int((counts.max(0) - counts.min(0)).max())

    data = data_set(tmp_path)
    even = partition(data, tmp_path / "even", PartitionOptions(clients=5, homogeneous=True))
    skewed = partition(data, tmp_path / "skewed", PartitionOptions(clients=5, dirichlet=0.3))
    assert spread(even) <= 1
    assert spread(skewed) > 10


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    data = data_set(tmp_path)
    written = []
    for folder, seed in (("one", 4), ("same", 4), ("other", 5)):
        options = PartitionOptions(clients=3, dirichlet=0.5, seed=seed)
        partition(data, tmp_path / folder, options)
        written.append(listing(tmp_path / folder))
    assert written[0] == written[1]
    assert written[0] != written[2]


def test_clients_of_a_column_are_called_by_its_values(tmp_path: Path) -> None:
    who = np.array(["King Lear", "Fool", "a/b"])[np.arange(SAMPLES) % 3]
    done = split(tmp_path, data_set(tmp_path, who=who), by="who")
    assert [shard.path.name for shard in done.shards] == ["Fool.npz", "King-Lear.npz", "a-b.npz"]
    assert (read_shard(done.shards[1].path).x[:][:, 0] % 3 == 0).all()


def test_small_clients_of_a_column_are_left_out(tmp_path: Path) -> None:
    who = np.array([0] * 5 + [1] * 10 + [2] * (SAMPLES - 15))
    data = data_set(tmp_path, who=who)
    done = split(tmp_path, data, by="who", min_samples=10)
    assert [shard.client for shard in done.shards] == ["1", "2"]
    assert done.left_out == ("0",)
    with pytest.raises(TrainingError, match=r"data.npz: no value of 'who' has 121 samples"):
        partition(data, tmp_path / "none", PartitionOptions(by="who", min_samples=121))
    assert not (tmp_path / "none").exists()


def test_bytes_become_floats_with_channels_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 5, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x_train=pixels, y_train=np.arange(8, dtype=np.uint8) % 2)
    options = PartitionOptions(clients=2, homogeneous=True)
    preparation = Preparation((0.5, 0.4, 0.3), (0.2, 0.2, 0.1), channels_last=True)
    done = partition(tmp_path / "d.npz", tmp_path / "s", options, preparation=preparation)
    shards = [np.load(shard.path) for shard in done.shards]
    x = np.concatenate([shard["x"] for shard in shards])
    mean, std = (np.array(v).reshape(3, 1, 1) for v in ([0.5, 0.4, 0.3], [0.2, 0.2, 0.1]))
    expected = (np.moveaxis(pixels, -1, 1) / 255 - mean) / std
    assert x.dtype == np.float32
    assert [s["y"].dtype for s in shards] == [np.int64, np.int64]
    for sample in expected:
        assert min(np.abs(x - sample).max((1, 2, 3))) < 1e-5
    with pytest.raises(TrainingError, match=r"x holds bytes \(uint8\), expected floats"):
        partition(tmp_path / "d.npz", tmp_path / "raw", options)


def test_torch_files_are_split_too_and_test_columns_stay_apart(tmp_path: Path) -> None:
    columns = {"x_train": torch.randn(9, 2), "y_train": torch.arange(9) % 3}
    torch.save(
        {**columns, "x_test": torch.zeros(1, 2), "y_test": torch.zeros(1)}, tmp_path / "d.pt"
    )
    done = split(tmp_path, tmp_path / "d.pt", clients=3, homogeneous=True)
    assert done.kept_apart == ("x_test", "y_test")
    assert [shard.samples for shard in done.shards] == [3, 3, 3]
    assert split_columns(done) == {"x", "y"}
    assert (
        partition(
            data_set(tmp_path), tmp_path / "plain", PartitionOptions(clients=2, homogeneous=True)
        ).kept_apart
        == ()
    )


def split_columns(done: Partition) -> set[str]:
    return {name for shard in done.shards for name in np.load(shard.path).files}


@pytest.mark.parametrize("y", [np.linspace(0, 1, 10), np.zeros((10, 4), int), np.arange(10) - 5])
def test_targets_that_are_no_classes_are_split_without_counts(tmp_path: Path, y: Any) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((10, 2)), y=y)
    done = split(tmp_path, tmp_path / "d.npz", clients=2, homogeneous=True)
    assert [(shard.samples, shard.class_counts) for shard in done.shards] == [(5, None), (5, None)]
    assert done.to_json()["class_counts"] is None


def test_existing_shards_are_overwritten_by_force_only(tmp_path: Path) -> None:
    options = PartitionOptions(clients=3, homogeneous=True)
    split(tmp_path)
    before = listing(tmp_path)
    with pytest.raises(UsageError, match=r"client-1.npz: exists already"):
        split(tmp_path, tmp_path / "data.npz", clients=3, homogeneous=True)
    assert listing(tmp_path) == before
    other = PartitionOptions(clients=3, homogeneous=True, seed=9)
    partition(tmp_path / "data.npz", tmp_path / "shards", other, force=True)
    assert listing(tmp_path) != before
    partition(tmp_path / "data.npz", tmp_path / "shards", options, force=True)
    assert listing(tmp_path) == before


def test_new_shards_never_stand_among_old_ones(tmp_path: Path) -> None:
    split(tmp_path)
    before = listing(tmp_path)
    fewer = PartitionOptions(clients=2, homogeneous=True)
    with pytest.raises(UsageError, match=r"shards: has client-3.npz, which would stand among"):
        partition(tmp_path / "data.npz", tmp_path / "shards", fewer, force=True)
    with pytest.raises(UsageError, match=r"has data.npz, which would stand among"):
        partition(tmp_path / "data.npz", tmp_path, fewer)
    assert listing(tmp_path) == before


def test_a_data_set_is_never_overwritten_by_its_shards(tmp_path: Path) -> None:
    data = data_set(tmp_path).rename(tmp_path / "client-1.npz")
    with pytest.raises(UsageError, match="the output is also an input"):
        partition(data, tmp_path, PartitionOptions(clients=2, homogeneous=True), force=True)


def test_a_failure_leaves_no_shard_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_set(tmp_path)
    prepared = Preparation.__call__
    calls = []

    def fail(self: Preparation, x: Any) -> Any:
        calls.append(len(x))
        if len(calls) > 4:  # in the third shard
            raise OSError(28, "No space left on device")
        return prepared(self, x)

    monkeypatch.setattr(Preparation, "__call__", fail)
    with pytest.raises(FedmergeError, match=r"can't be written \(No space left on device\)"):
        split(tmp_path, data)
    assert list(listing(tmp_path)) == ["data.npz"]
    assert not (tmp_path / "shards").exists()


@contextmanager
def few_open_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux does")
def test_more_clients_than_open_files_are_allowed_are_no_problem(tmp_path: Path) -> None:
    data = data_set(tmp_path, who=np.arange(SAMPLES) % 60)
    with few_open_files(20):
        done = split(tmp_path, data, by="who")
    assert len(done.shards) == 60


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"clients": 3}, "0 ways to split are given, expected one"),
        ({"clients": 3, "homogeneous": True, "dirichlet": 1.0}, "2 ways to split are given"),
        ({"homogeneous": True}, "`clients` is needed"),
        ({"clients": 3, "by": "who"}, "`clients` and `by` exclude each other"),
        ({"clients": 1, "homogeneous": True}, "`clients` is 1, expected a whole number from 2"),
        ({"by": "who", "min_samples": 0}, "`min_samples` is 0, expected a whole number from 1"),
        ({"by": "who", "seed": -1}, "`seed` is -1, expected a whole number from 0"),
    ],
)
def test_options_that_make_no_split_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        PartitionOptions(**options)


def test_data_that_cannot_be_split_so_are_refused(tmp_path: Path) -> None:
    data = data_set(tmp_path, short=np.arange(5))
    cases: list[tuple[dict[str, Any], type[FedmergeError], str]] = [
        ({"by": "nobody"}, UsageError, "there is no 'nobody', only 'x', 'y', 'short'"),
        ({"by": "short"}, TrainingError, "'short' has 5 values for 120 samples"),
        ({"clients": 121, "homogeneous": True}, UsageError, "120 samples cannot be split"),
        ({"clients": 50, "homogeneous": True, "min_samples": 3}, UsageError, "clients of at least"),
        ({"clients": 3, "dirichlet": -1.0}, UsageError, "`dirichlet` is -1.0, expected a positive"),
    ]
    for options, kind, problem in cases:
        with pytest.raises(kind, match=problem):
            split(tmp_path, data, **options)
    assert not (tmp_path / "shards").exists()
    with pytest.raises(UsageError, match="its folder does not exist"):
        partition(data, tmp_path / "no" / "where", PartitionOptions(clients=2, homogeneous=True))
    with pytest.raises(UsageError, match=r"data.npz: is a file, not a folder"):
        partition(data, data, PartitionOptions(clients=2, homogeneous=True))
