from pathlib import Path

import pytest
import torch

from fedmerge.checkpoint import _tensors, open_checkpoint
from fedmerge.checkpoint._mapping import mapped_part
from fedmerge.checkpoint._tensors import non_finite
from tests.unit.checkpoint.samples import save_zip

LARGE = 300  # rows and columns of a tensor that is read from its file


def matrix() -> torch.Tensor:
    return torch.randn(LARGE, LARGE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_counted_in_every_block(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tensors, "_BLOCK", 10)
    values = torch.ones(95, dtype=dtype)
    assert non_finite(values) == (0, 0)
    values[[3, 50, 94]] = torch.nan
    values[51], values[94] = torch.inf, -torch.inf
    assert non_finite(values.reshape(5, 19)) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_whose_squares_overflow_are_finite(dtype: torch.dtype) -> None:
    assert non_finite(torch.full((7,), torch.finfo(dtype).max, dtype=dtype)) == (0, 0)
    assert non_finite(torch.full((7,), torch.finfo(dtype).tiny, dtype=dtype)) == (0, 0)


def test_nothing_and_single_numbers_are_finite() -> None:
    assert non_finite(torch.zeros(0, 4)) == (0, 0)
    assert non_finite(torch.tensor(1.0)) == (0, 0)
    assert non_finite(torch.tensor(torch.inf)) == (0, 1)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say")
def test_a_mapped_tensor_is_found_in_its_file(tmp_path: Path) -> None:
    path = save_zip({"w": matrix()}, tmp_path / "a name with spaces.pt")
    tensor = torch.load(path, weights_only=True, mmap=True)["w"]
    place = mapped_part(tensor.data_ptr(), tensor.nbytes)
    assert place is not None
    assert place.path == path
    content = path.read_bytes()[place.offset : place.offset + tensor.nbytes]
    assert content == matrix().numpy().tobytes()
    assert mapped_part(matrix().data_ptr(), tensor.nbytes) is None
    path.rename(tmp_path / "b.pt")
    moved = mapped_part(tensor.data_ptr(), tensor.nbytes)
    assert moved is not None
    assert moved.path == tmp_path / "b.pt"
    save_zip({"w": matrix() + 1}, tmp_path / "c.pt").replace(tmp_path / "b.pt")
    assert mapped_part(tensor.data_ptr(), tensor.nbytes) is None  # another file by that name


@pytest.mark.parametrize("read_from", [0, 1 << 18, 1 << 40])
def test_tensors_of_torch_files_are_read_whatever_their_strides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_from: int
) -> None:
    monkeypatch.setattr(_tensors, "_READ_FROM", read_from)
    images = torch.arange(9_600.0).reshape(4, 4, 60, 10)
    state = {
        "plain": matrix(),
        "transposed": matrix().T,
        "last": images.contiguous(memory_format=torch.channels_last),
        "part": matrix()[10:290],
        "strided": matrix()[::2, ::3],
        "expanded": torch.ones(1, 1).expand(LARGE, LARGE),
        "half": matrix().half(),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 3),
    }
    client = open_checkpoint(save_zip(state, tmp_path / "a.pt"))
    for name, tensor in state.items():
        found = client.read_torch(name)
        assert torch.equal(found, tensor), name
        assert found.is_contiguous()


def test_a_torch_file_replaced_while_open_is_read_as_it_was(tmp_path: Path) -> None:
    client = open_checkpoint(save_zip({"w": matrix()}, tmp_path / "a.pt"))
    save_zip({"w": matrix() + 1}, tmp_path / "b.pt").replace(tmp_path / "a.pt")
    assert torch.equal(client.read_torch("w"), matrix())
