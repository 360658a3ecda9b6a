import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmerge.checkpoint import raw_bytes, write_model, writing
from fedmerge.values import Array, TensorInfo

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
]


def tensors() -> dict[str, torch.Tensor]:
    made = {
        f"layer.{name}": torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES
    }
    return made | {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "ünï": torch.ones(70)}


def write(path: Path, state: dict[str, torch.Tensor], **aliases: str) -> None:
    infos = {
        name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in state.items()
    }

    def read(name: str) -> Array:
        tensor = state[name]
        array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array

    write_model(path, infos, read, aliases=aliases)


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # all checksums are right
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_pickle_and_the_values_are_those_of_torch_save(tmp_path: Path) -> None:
    state = tensors()
    write(tmp_path / "ours.pt", state)
    with (tmp_path / "theirs.pt").open("wb") as file:
        torch.save(state, file)
    ours, theirs = records(tmp_path / "ours.pt"), records(tmp_path / "theirs.pt")
    assert set(ours) == {name for name in theirs if "/." not in name}
    for name, content in ours.items():
        assert content == theirs[name], name


@pytest.mark.parametrize("large", [1 << 30, 0], ids=["small records", "as for large records"])
@pytest.mark.parametrize("mmap", [True, False])
def test_torch_reads_every_dtype_also_memory_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int, mmap: bool
) -> None:
    monkeypatch.setattr(writing, "_LARGE", large)
    path = tmp_path / "a.pt"
    write(path, tensors())
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert list(loaded) == list(tensors())
    for name, tensor in tensors().items():
        assert raw_bytes(loaded[name]).tobytes() == raw_bytes(tensor).tobytes()
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape


@pytest.mark.parametrize("large", [1 << 30, 0], ids=["small records", "as for large records"])
def test_every_record_begins_at_a_multiple_of_64_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(writing, "_LARGE", large)
    path = tmp_path / "a.pt"
    write(path, tensors())
    reader: Any = torch._C.PyTorchFileReader(str(path))
    offsets = [reader.get_record_offset(name) for name in reader.get_all_records()]
    assert len(offsets) == len(tensors()) + 3
    assert {offset % 64 for offset in offsets} == {0}


def test_an_alias_is_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(100, generator=torch.Generator().manual_seed(0))
    write(tmp_path / "a.pt", {"a": weight, "b": weight}, b="a")
    stored = [name for name in records(tmp_path / "a.pt") if "/data/" in name]
    assert stored == ["archive/data/0"]
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    np.testing.assert_array_equal(loaded["b"].numpy(), weight.numpy())
