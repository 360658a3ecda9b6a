import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmerge.checkpoint import from_state_dict, open_checkpoint
from fedmerge.errors import CheckpointError
from fedmerge.values import Client
from tests.unit.checkpoint.samples import (
    save_legacy,
    save_safetensors,
    save_zip,
    state,
)

SAVERS = [save_zip, save_legacy, save_safetensors]
DTYPES = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float32,
    torch.bfloat16: np.float32,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_read_exactly_half_precision_as_float32(
    tmp_path: Path, save: object, dtype: torch.dtype
) -> None:
    assert callable(save)
    values = torch.tensor([[0, 1, 2], [3, 100, 1]]).to(dtype)
    save({"x": values, "scalar": values[0, 1].clone(), "w": torch.ones(1)}, tmp_path / "a")
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.tensors["x"].dtype == str(dtype).removeprefix("torch.")
    array = checkpoint.read("x")
    assert array.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(array, values.to(torch.float64).numpy())
    assert checkpoint.read("scalar").shape == ()


@pytest.mark.parametrize("save", SAVERS)
def test_what_was_read_belongs_to_the_caller(tmp_path: Path, save: object) -> None:
    assert callable(save)
    path = tmp_path / "a"
    save(state(), path)
    before = path.read_bytes()
    checkpoint = open_checkpoint(path)
    first = checkpoint.read("fc1.weight")
    first[:] = 9
    np.testing.assert_array_equal(checkpoint.read("fc1.weight"), state()["fc1.weight"].numpy())
    assert path.read_bytes() == before


def test_a_state_dict_in_memory_is_not_touched() -> None:
    tensors = state()
    checkpoint = from_state_dict(tensors, name="a")
    checkpoint.read("fc1.weight")[:] = 9
    assert torch.equal(tensors["fc1.weight"], state()["fc1.weight"])


def test_strides_are_resolved(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    checkpoint = open_checkpoint(save_zip({"x": tensor}, tmp_path / "a.pt"))
    array = checkpoint.read("x")
    np.testing.assert_array_equal(array, tensor.numpy())
    assert array.flags.c_contiguous


@pytest.mark.parametrize("save", SAVERS)
def test_nan_and_infinities_are_refused_with_their_number(tmp_path: Path, save: object) -> None:
    assert callable(save)
    broken = torch.ones(3, 4)
    broken[0, :2] = float("nan")
    broken[1, 0] = float("-inf")
    save({"good": torch.ones(2), "fc.weight": broken, "n": torch.ones(2).long()}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert checkpoint.read("good").tolist() == [1, 1]
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"a\.pt: 'fc\.weight' has 2 NaN and 1 infinite of 12 values"
        ):
            checkpoint.read("fc.weight")


def test_a_tensor_is_checked_once() -> None:
    tensors = {"w": torch.ones(3)}
    checkpoint = from_state_dict(tensors, name="a")
    checkpoint.read("w")
    tensors["w"][0] = float("nan")
    assert np.isnan(checkpoint.read("w")[0])


@pytest.mark.parametrize("save", SAVERS)
def test_digests_are_of_the_stored_bytes(tmp_path: Path, save: object) -> None:
    assert callable(save)
    values = torch.tensor([1.5, -2.0], dtype=torch.float16)
    path = tmp_path / "a"
    save({"h": values, "none": torch.ones(0)}, path)
    checkpoint = open_checkpoint(path)
    stored = np.array([1.5, -2.0], dtype="<f2").tobytes()
    assert checkpoint.tensor_digest("h") == hashlib.sha256(stored).hexdigest()
    assert checkpoint.tensor_digest("none") == hashlib.sha256(b"").hexdigest()
    assert checkpoint.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_hash_in_memory_depends_on_names_dtypes_shapes_and_values() -> None:
    variants = [
        {"w": torch.zeros(4)},
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4).half()},
        {"w": torch.ones(4)},
    ]
    hashes = [from_state_dict(tensors, name="a").sha256() for tensors in variants]
    assert len(set(hashes)) == len(variants)
    assert from_state_dict({"w": torch.zeros(4)}, name="b").sha256() == hashes[0]


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    path = save_safetensors(state(), tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        [checkpoint.read(name) for name in checkpoint.tensors]
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read"):
        checkpoint.sha256()


def test_a_checkpoint_is_a_client(tmp_path: Path) -> None:
    client: Client = open_checkpoint(save_zip(state(), tmp_path / "c1.pt"))
    assert client.name == "c1"
    assert open_checkpoint(tmp_path / "c1.pt", name="site").name == "site"


def test_a_tensor_can_be_read_in_its_stored_dtype() -> None:
    tensors = {"h": torch.tensor([1.5, 2.0]).bfloat16(), "n": torch.tensor(3), "x": torch.ones(2)}
    tensors["bad"] = torch.tensor([float("inf")]).half()
    checkpoint = from_state_dict(tensors | {"y": tensors["x"]}, name="a")
    for name in ("h", "n", "x", "y"):
        expected = tensors["x" if name == "y" else name]
        assert torch.equal(checkpoint.read_torch(name), expected)
        assert checkpoint.read_torch(name).dtype == expected.dtype
    with pytest.raises(CheckpointError, match="'bad' has 1 infinite of 1 values"):
        checkpoint.read_torch("bad")


def test_a_renamed_checkpoint_is_the_same_under_another_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_zip(state(), tmp_path / "c1.pt"))
    other = checkpoint.renamed("site")
    assert (checkpoint.name, other.name) == ("c1", "site")
    assert other.sha256() == checkpoint.sha256()
    np.testing.assert_array_equal(other.read("fc1.bias"), checkpoint.read("fc1.bias"))
