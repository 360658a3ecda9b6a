"""The benchmark of retraining splits a run into training and all else."""

from pathlib import Path

import numpy as np

from benchmarks.retraining import CLASSES, measure, retrained, write_shards

LAYERS = ["conv1", "conv2", "fc1", "last layer"]


def test_every_part_of_a_run_is_measured() -> None:
    parts = measure(clients=2, samples=40, epochs=1, repeats=1)["parts"]
    assert [part["name"] for part in parts] == ["preparation", *LAYERS, "the result"]
    trained = [part["name"] for part in parts if part["training"]["cpu"] > 0]
    assert trained == LAYERS
    assert all(part["beyond"]["wall"] > 0 for part in parts)


def test_more_epochs_are_more_training(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", clients=2, samples=64)
    few, many = (
        sum(part.training.cpu for part in retrained(shards, tmp_path / str(n), epochs=n))
        for n in (1, 6)
    )
    assert many > 2 * few


def test_shards_are_digits_of_skewed_classes(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", clients=3, samples=200)
    assert sorted(path.name for path in folder.iterdir()) == ["c0.npz", "c1.npz", "c2.npz"]
    for path in folder.iterdir():
        shard = np.load(path)
        assert shard["x"].shape == (200, 1, 28, 28)
        assert shard["x"].dtype == np.float32
        assert (shard["x"].min(), shard["x"].max()) == (0, 1)
        counts = np.bincount(shard["y"], minlength=CLASSES)
        assert counts.max() > 2 * counts.mean()
