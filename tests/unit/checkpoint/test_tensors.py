import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmerge.checkpoint import View, non_finite, open_checkpoint, tensors
from fedmerge.errors import CheckpointError
from tests.unit.checkpoint.samples import save_legacy, save_safetensors, save_zip

LARGE = 300  # rows and columns of a tensor that is read from its file


def matrix() -> torch.Tensor:
    return torch.randn(LARGE, LARGE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_counted_in_every_block(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_BLOCK", 10)
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


@pytest.mark.parametrize("save", [save_zip, save_legacy])
def test_tensors_of_torch_files_are_read_whatever_their_strides(
    tmp_path: Path, save: Callable[[object, Path], Path]
) -> None:
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
    client = open_checkpoint(save(state, tmp_path / "a.pt"))
    for name, tensor in state.items():
        found = client.read_torch(name)
        assert torch.equal(found, tensor), name
        assert found.is_contiguous()


@pytest.mark.parametrize("save", [save_zip, save_legacy, save_safetensors])
def test_a_file_that_changed_since_it_was_opened_is_refused(
    tmp_path: Path, save: Callable[[object, Path], Path]
) -> None:
    path, other = tmp_path / "a.pt", tmp_path / "b.pt"
    content = save({"w": matrix()}, path).read_bytes()
    for change in (
        lambda: path.write_bytes(content[: len(content) // 2]),  # which would end a memory map
        lambda: path.write_bytes(content),  # in place, and at another time
        lambda: save({"w": matrix() + 1}, other).replace(path),
    ):
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))
        client = open_checkpoint(path)
        assert torch.equal(client.read_torch("w"), matrix())
        change()
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            client.read_torch("w")
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            client.sha256()


def test_a_record_that_contradicts_its_checksum_is_refused(tmp_path: Path) -> None:
    path = save_zip({"w": matrix(), "v": matrix() + 1}, tmp_path / "a.pt")
    content = bytearray(path.read_bytes())
    content[content.index(matrix().numpy().tobytes()[:64])] ^= 1
    path.write_bytes(content)
    client = open_checkpoint(path)
    assert torch.equal(client.read_torch("v"), matrix() + 1)
    with pytest.raises(CheckpointError, match="contradict their checksum"):
        client.read_torch("w")


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save_zip({"w": matrix()}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(open_checkpoint(path).read_torch("w"), matrix())


@given(shapes=st.lists(st.integers(0, 5), max_size=4))
def test_dense_views_have_the_strides_of_torch(shapes: list[int]) -> None:
    view = View.dense(tuple(shapes))
    if all(shapes):
        assert view.stride == torch.empty(shapes).stride()
    assert len(view.stride) == len(shapes)
