import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedmerge.errors import TrainingError, UnsafeCheckpointError
from fedmerge.probes import read_probes
from fedmerge.training import Preparation
from fedmerge.values import Array

X = np.arange(40, dtype=np.float32).reshape(10, 4) / 7


def write(path: Path, **arrays: Array) -> Path:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    elif path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_every_container_gives_its_inputs_and_no_labels(tmp_path: Path, suffix: str) -> None:
    probes = read_probes(write(tmp_path / f"p{suffix}", x=X, y=np.zeros(3)))
    assert probes.source == "data"
    assert len(probes.inputs) == 1
    assert torch.equal(probes.inputs[0], torch.from_numpy(X))


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("y", "x"), "x"),
        (("images",), "images"),
        (("x_test", "x_train", "y_test"), "x_train"),
        (("x_test", "y_test"), "x_test"),
    ],
)
def test_inputs_are_found_by_name_or_as_the_only_array(
    tmp_path: Path, names: tuple[str, ...], taken: str
) -> None:
    arrays = {name: X + place for place, name in enumerate(names)}
    (x,) = read_probes(write(tmp_path / "p.npz", **arrays)).inputs
    assert np.array_equal(x.numpy(), arrays[taken])


def test_inputs_of_several_arguments_are_found_by_their_names(tmp_path: Path) -> None:
    path = write(tmp_path / "p.npz", lengths=np.arange(10), image=X)
    image, lengths = read_probes(path, arguments=("image", "lengths")).inputs
    assert np.array_equal(image.numpy(), X)
    assert lengths.tolist() == list(range(10))
    with pytest.raises(
        TrainingError, match="expected 'image' and 'mask', found 'lengths', 'image'"
    ):
        read_probes(path, arguments=("image", "mask"))


def test_bytes_are_normalised_and_turned_as_in_shards(tmp_path: Path) -> None:
    pixels = np.arange(2 * 5 * 6 * 3, dtype=np.uint8).reshape(2, 5, 6, 3)
    path = write(tmp_path / "p.npz", x=pixels)
    (x,) = read_probes(path, preparation=Preparation((0.5,), (0.25,), channels_last=True)).inputs
    assert x.shape == (2, 3, 5, 6)
    assert x[1, 2, 4, 5].item() == pytest.approx((pixels[1, 4, 5, 2] / 255 - 0.5) / 0.25)
    with pytest.raises(TrainingError, match=r"p\.npz: x holds bytes \(uint8\)"):
        read_probes(path)


def test_a_limit_takes_a_random_subset_that_its_seed_fixes(tmp_path: Path) -> None:
    path = write(tmp_path / "p.pt", x=X)
    chosen = [read_probes(path, count=4, seed=seed).inputs[0][:, 0].tolist() for seed in (1, 1, 2)]
    assert len(set(chosen[0])) == 4
    assert set(chosen[0]) <= set(X[:, 0].tolist())
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(read_probes(path, count=99)) == 10


def test_a_few_samples_of_a_large_file_are_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmerge.checkpoint.npz._READ_WHOLE", 1_000_000)
    path = write(tmp_path / "large.npz", x=np.ones((2000, 1000), np.float32))
    tracemalloc.start()
    probes = read_probes(path, count=3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(probes) == 3
    assert peak < 5_000_000  # the file has 8 MB, looked through in parts of 1


def test_floats_get_the_precision_of_the_example(tmp_path: Path) -> None:
    path = write(tmp_path / "p.npz", x=X)
    assert read_probes(path, like=(torch.zeros(1, 4).double(),)).inputs[0].dtype == torch.float64
    with pytest.raises(TrainingError, match="inputs are floats, but the model takes whole numbers"):
        read_probes(path, like=(torch.zeros(1, 4, dtype=torch.int64),))
    with pytest.raises(TrainingError, match="found 1 input, but the model takes 2"):
        read_probes(path, like=(torch.zeros(1, 4), torch.zeros(1, 4)))


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"a": X, "b": X}, "expected 'x', found 'a', 'b'"),
        ({"x": X[:0]}, r"'x' is \(0, 4\), expected at least one sample"),
        ({"x": np.array(1.0)}, r"'x' is \(\), expected at least one sample"),
        ({"x": np.full((2, 2), np.nan)}, "'x' has NaN or infinite numbers"),
        ({"x": np.array(["a", "b"])}, "x holds <U1"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(
    tmp_path: Path, arrays: dict[str, Array], problem: str
) -> None:
    np.savez(tmp_path / "p.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=rf"p\.npz: {problem}"):
        read_probes(tmp_path / "p.npz")


def test_inputs_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.npz", a=X, b=X[:4])
    with pytest.raises(TrainingError, match=r"there are 10 of 'a', 4 of 'b'"):
        read_probes(path, arguments=("a", "b"))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"gone\.npz: no such file") as caught:
        read_probes(tmp_path / "gone.npz")
    assert "labels are not needed" in caught.value.hint
    with pytest.raises(TrainingError, match=r"its name ends in '\.txt'"):
        read_probes(tmp_path / "p.txt")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    with pytest.raises(UnsafeCheckpointError, match="it holds Python objects"):
        read_probes(tmp_path / "objects.npz")
