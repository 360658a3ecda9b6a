import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedmerge.checkpoint import StoredRows
from fedmerge.errors import TrainingError, UnsafeCheckpointError, UsageError
from fedmerge.training import (
    EVALUATION_KEYS,
    TRAINING_KEYS,
    Preparation,
    Shard,
    pair_shards,
    parse_normalize,
    read_column,
    read_shard,
)
from fedmerge.values import Array, IntArray

X = np.arange(24, dtype=np.float64).reshape(4, 6) / 7
Y = np.array([0, 2, 1, 2], dtype=np.int32)
ALL = np.arange(4)


def batch_of(shard: Shard, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a model of one input is fed with, and the targets."""
    x, y = shard.batch(rows, "cpu")
    assert isinstance(x, torch.Tensor)
    return x, y


def write(path: Path, x: Array = X, y: Array = Y) -> Path:
    if path.suffix == ".npz":
        np.savez(path, x=x, y=y)
    elif path.suffix == ".pt":
        torch.save({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, path)
    else:
        save_file({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_every_container_gives_the_same_batches(tmp_path: Path, suffix: str) -> None:
    shard = read_shard(write(tmp_path / f"c1{suffix}"))
    x, y = batch_of(shard, np.array([2, 0]))
    assert (shard.name, len(shard)) == ("c1", 4)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert torch.equal(x, torch.from_numpy(X[[2, 0]]).float())
    assert y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("y", "rows"),
    [
        (np.array([1, 1, 5, 1, -2]), [0, 1, 2, 4]),
        (np.array([3]), [0]),
        (np.array([[1, 1], [1, 1], [1, 1], [0, 9]]), [0, 1, 3]),
        (np.zeros((3, 0), np.int64), [0, 1]),
    ],
)
def test_extreme_rows_have_the_smallest_and_the_largest_target(y: Array, rows: list[int]) -> None:
    assert Shard("s", np.zeros((len(y), 2)), y).extreme_rows().tolist() == rows


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_what_is_done_to_a_shard_never_changes_its_file(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"c{suffix}")
    before = path.read_bytes()
    shard = read_shard(path)
    shard.x[:][:] = 0
    shard.y[:] = 0
    assert path.read_bytes() == before


def test_a_batch_of_a_large_file_reads_its_own_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmerge.checkpoint.npz._READ_WHOLE", 1_000_000)
    path = tmp_path / "large.npz"
    x = np.random.default_rng(0).normal(size=(2000, 1000)).astype(np.float32)
    np.savez(path, y=np.zeros(2000, int), x=x)
    shard = read_shard(path)
    assert isinstance(shard.x, StoredRows)
    rows = np.array([5, 3, 4, 5, 1999])
    tracemalloc.start()
    found, _ = batch_of(shard, rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000  # of 8 MB
    assert np.array_equal(found.numpy(), x[rows])
    assert np.array_equal(shard.x[:7], x[:7])


def test_compressed_and_fortran_arrays_are_read_as_well(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "small.npz", x=X, y=Y)
    np.savez(tmp_path / "turned.npz", x=np.asfortranarray(X), y=Y)
    for name in ("small.npz", "turned.npz"):
        assert np.array_equal(read_shard(tmp_path / name).x[:], X)


def test_old_torch_files_and_bfloat16_are_read(tmp_path: Path) -> None:
    content = {"x": torch.ones(2, 3, dtype=torch.bfloat16) / 3, "y": torch.tensor([True, False])}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    x, y = batch_of(read_shard(tmp_path / "old.pt"), np.arange(2))
    assert torch.equal(x, content["x"].float())
    assert y.tolist() == [1, 0]


def test_the_first_pair_of_names_that_is_there_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "all.npz"
    np.savez(
        path, x_train=X, y_train=Y, x_test=X[:1] + 1, y_test=Y[:1], role=np.array([1, 1, 2, 2])
    )
    assert len(read_shard(path, keys=TRAINING_KEYS)) == 4
    assert len(read_shard(path, keys=EVALUATION_KEYS)) == 1
    assert read_column(path, "role").tolist() == [1, 1, 2, 2]
    with pytest.raises(TrainingError, match=r"all.npz: expected 'x' and 'y', found 'x_train'"):
        read_shard(path)
    with pytest.raises(UsageError, match="there is no 'speaker', only 'x_train'"):
        read_column(path, "speaker")


@pytest.mark.parametrize(
    ("x", "y", "problem"),
    [
        (X, Y[:3], r"x is \(4, 6\) and y is \(3,\), expected one target per sample"),
        (X[:0], Y[:0], "is empty"),
        (X, np.array(1), r"x is .* and y is \(\)"),
        (X > 1, Y, "x holds bool, expected floats"),
        (X + 1j, Y, "x holds complex128"),
        (X, np.array(list("abcd")), "has the class 'a', expected numbers"),
    ],
)
def test_a_wrong_shard_is_named_with_what_was_found(
    tmp_path: Path, x: Array, y: Array, problem: str
) -> None:
    np.savez(tmp_path / "c7.npz", x=x, y=y)
    with pytest.raises(TrainingError, match=r"c7\.npz: " + problem):
        read_shard(tmp_path / "c7.npz")


def test_files_that_hold_python_objects_are_refused_unread(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path(tmp_path / "sprung").touch, ())  # type: ignore[return-value]

    np.savez(tmp_path / "a.npz", x=np.array([Trap()], dtype=object), y=Y[:1])
    torch.save({"x": Trap(), "y": torch.ones(1)}, tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(pickle.dumps({"x": Trap()}))
    for name in ("a.npz", "b.pt", "c.pt"):
        with pytest.raises(UnsafeCheckpointError, match=f"{name}.*: refused, it (holds|asks)"):
            read_shard(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_a_cut_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"c1{suffix}")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        TrainingError, match=rf"c1\{suffix}: truncated or damaged \(its|no checkpoint"
    ):
        read_shard(path)


def test_a_file_that_is_no_shard_is_told_what_one_is(tmp_path: Path) -> None:
    (tmp_path / "c1.txt").write_text("x y")
    with pytest.raises(TrainingError, match=r"c1.txt: no shard, for its name ends in '.txt'"):
        read_shard(tmp_path / "c1.txt")
    with pytest.raises(TrainingError, match=r"c1.npz: no such file"):
        read_shard(tmp_path / "c1.npz")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(TrainingError, match="it holds a list, expected a dictionary"):
        read_shard(tmp_path / "list.pt")


def test_the_users_own_function_gives_the_shard_of_a_client(tmp_path: Path) -> None:
    code = "import torch\ndef load(client):\n    n = int(client[1:])\n"
    code += (
        "    return torch.ones(n, 2), torch.zeros(n)\nnothing = 3\ndef bad(client):\n    return 1\n"
    )
    (tmp_path / "data.py").write_text(code)
    shard = read_shard(f"{tmp_path}/data.py:load", client="c3")
    assert (shard.name, shard.x.shape) == ("c3", (3, 2))
    with pytest.raises(TrainingError, match="fails: ValueError"):
        read_shard(f"{tmp_path}/data.py:load", client="x")
    with pytest.raises(TrainingError, match="returns int, expected samples and targets"):
        read_shard(f"{tmp_path}/data.py:bad", client="c1")
    with pytest.raises(UsageError, match="is no function"):
        read_shard(f"{tmp_path}/data.py:nothing", client="c1")
    with pytest.raises(UsageError, match="defines no 'missing'"):
        read_shard(f"{tmp_path}/data.py:missing", client="c1")


def shard_of(x: Array, preparation: Preparation) -> Shard:
    return Shard("c", x, np.zeros(len(x), int), preparation, "c.npz")


def test_integers_are_tokens() -> None:
    x, _ = batch_of(shard_of(np.array([[1, 2]], np.uint16), Preparation()), np.array([0]))
    assert (x.dtype, x.tolist()) == (torch.int64, [[1, 2]])


def test_bytes_are_divided_by_255_before_they_are_normalised() -> None:
    pixels = np.array([[[0, 51], [102, 255]]], np.uint8)
    x, _ = batch_of(shard_of(pixels, Preparation((0.2,), (0.5,))), np.array([0]))
    assert x.shape == (1, 1, 2, 2)  # grey images have one channel
    assert np.allclose(x.flatten(), [-0.4, 0.0, 0.4, 1.6], atol=1e-7)


def test_channels_are_normalised_one_by_one_and_moved_to_the_front() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 5, 6, 3), dtype=np.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    x, _ = batch_of(shard_of(pixels, Preparation(mean, std, channels_last=True)), np.arange(2))
    expected = ((pixels / 255 - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
    assert np.allclose(x, expected, atol=1e-6)


def test_images_that_are_ready_are_left_alone() -> None:
    ready = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    x, _ = batch_of(shard_of(ready, Preparation((0.5,), (0.5,), True)), np.arange(2))
    assert np.array_equal(x, ready)


def test_float_images_with_channels_last_are_turned_on_request_only() -> None:
    turned = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    for asked, shape in ((True, (2, 3, 8, 8)), (False, (2, 8, 8, 3))):
        x, _ = batch_of(shard_of(turned, Preparation(channels_last=asked)), np.arange(2))
        assert x.shape == shape


@pytest.mark.parametrize(
    ("shape", "preparation", "problem"),
    [
        ((2, 8, 8), Preparation(), r"x holds bytes \(uint8\), expected floats"),
        ((2, 8, 8, 3), Preparation((0.5,), (0.5,)), "its channels seem to come last"),
        ((2, 3, 8, 8), Preparation((0.5,) * 2, (1.0,) * 2), "2 means, but x has 3 channels"),
    ],
)
def test_bytes_that_are_not_ready_are_refused(
    shape: tuple[int, ...], preparation: Preparation, problem: str
) -> None:
    with pytest.raises(TrainingError, match=rf"c\.npz: .*{problem}"):
        shard_of(np.zeros(shape, np.uint8), preparation)


@pytest.mark.parametrize("text", ["", "0.5", "a,b", "1,2,3"])
def test_a_wrong_normalisation_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"`normalize` is '.*', expected MEAN,STD"):
        parse_normalize(text)


def test_a_deviation_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="deviations above 0"):
        Preparation(*parse_normalize("0.5,0"))


def paths(*names: str) -> list[Path]:
    return [Path("shards") / f"{name}.npz" for name in names]


def test_clients_and_shards_are_paired_by_name() -> None:
    pairing = pair_shards(["b", "a"], paths("a", "b"))
    assert {name: path.name for name, path in pairing.shards.items()} == {
        "b": "b.npz",
        "a": "a.npz",
    }
    assert list(pairing.shards) == ["b", "a"]
    assert pairing.why == "paired by name"


def test_if_one_name_has_no_partner_all_are_paired_in_natural_order() -> None:
    pairing = pair_shards(["c10", "c2", "c1"], paths("c1", "d10", "c2"))
    assert {name: path.stem for name, path in pairing.shards.items()} == {
        "c1": "c1",
        "c2": "c2",
        "c10": "d10",
    }
    assert list(pairing.shards) == ["c10", "c2", "c1"]
    assert "paired in order (c1 ← c1.npz, c2 ← c2.npz, c10 ← d10.npz)" in pairing.why


def test_equal_stems_in_several_folders_are_paired_in_order() -> None:
    files = [Path("n10/train.npz"), Path("n9/train.npz")]
    assert list(pair_shards(["x", "y"], files).shards.values()) == [files[1], files[0]]


def test_unequal_numbers_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="2 clients but 1 shards"):
        pair_shards(["a", "b"], paths("a"))
