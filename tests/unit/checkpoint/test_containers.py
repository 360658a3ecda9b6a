import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedmerge.checkpoint import Checkpoint, ReadOptions, open_checkpoint
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from tests.unit.checkpoint.samples import (
    save_legacy,
    save_safetensors,
    save_sharded,
    save_zip,
    state,
    write_index,
)

SAVERS = {"torch zip": save_zip, "torch legacy": save_legacy, "safetensors": save_safetensors}


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert checkpoint.tensors[name].dtype == str(tensor.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy())


@pytest.mark.parametrize("container", SAVERS)
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.t7", "no_suffix"])
def test_the_content_decides_the_container_whatever_the_name(
    tmp_path: Path, container: str, name: str
) -> None:
    path = SAVERS[container](state(), tmp_path / name)
    checkpoint = open_checkpoint(path)
    assert checkpoint.container == container
    assert checkpoint.size == path.stat().st_size
    assert checkpoint.location == ""
    assert checkpoint.notes == ()
    assert_holds(checkpoint, state())


def test_torch_files_keep_the_stored_order(tmp_path: Path) -> None:
    assert list(open_checkpoint(save_zip(state(), tmp_path / "a.pt")).tensors) == list(state())


def test_safetensors_metadata_is_kept_and_other_containers_have_none(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "a.safetensors", metadata={"format": "pt", "x": "ü"})
    assert open_checkpoint(tmp_path / "a.safetensors").metadata == {"format": "pt", "x": "ü"}
    assert open_checkpoint(save_zip(state(), tmp_path / "a.pt")).metadata == {}


@pytest.mark.parametrize(
    ("save", "container"),
    [
        (save_safetensors, "sharded safetensors"),
        (save_zip, "sharded torch"),
        (save_legacy, "sharded torch"),
    ],
)
def test_shards_are_read_through_their_index_or_folder(
    tmp_path: Path, save: Callable[[dict[str, torch.Tensor], Path], Path], container: str
) -> None:
    index = save_sharded(state(), tmp_path, save)
    for path in (index, tmp_path):
        checkpoint = open_checkpoint(path)
        assert checkpoint.container == container
        assert checkpoint.size == sum(file.stat().st_size for file in tmp_path.iterdir())
        assert_holds(checkpoint, state())
    assert list(open_checkpoint(index).tensors) == list(state())


def test_the_hash_of_shards_is_that_of_their_sorted_hashes(tmp_path: Path) -> None:
    index = save_sharded(state(), tmp_path, save_safetensors)
    lines = sorted(
        f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"
        for file in tmp_path.iterdir()
    )
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert open_checkpoint(index).sha256() == expected


def test_linked_shards_are_fine(tmp_path: Path) -> None:
    save_safetensors(state(), tmp_path / "blob")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").symlink_to(tmp_path / "blob")
    index = write_index(tmp_path / "model", dict.fromkeys(state(), "a.safetensors"))
    assert_holds(open_checkpoint(index), state())


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "x/../../a", "/etc/passwd", "C:\\a", "..\\a", "C:a", ""]
)
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    save_safetensors(state(), tmp_path / "a.safetensors")
    (tmp_path / "model").mkdir()
    index = write_index(tmp_path / "model", {"fc1.weight": shard})
    with pytest.raises(CheckpointError, match="a shard outside its folder"):
        open_checkpoint(index)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = save_sharded(state(), tmp_path, save_safetensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard 'model-00002-of-00002\.safetensors' is miss"):
        open_checkpoint(index)


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    save_safetensors(state(), tmp_path / "a.safetensors")
    index = write_index(tmp_path, {"fc9.weight": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"'fc9\.weight' is not in its shard 'a\.safet"):
        open_checkpoint(index)


def test_an_index_as_a_shard_is_refused(tmp_path: Path) -> None:
    index = write_index(tmp_path, {"fc.weight": "model.safetensors.index.json"})
    with pytest.raises(CheckpointError, match="a shard index where a shard was expected"):
        open_checkpoint(index)


@pytest.mark.parametrize("places", [[], {}, {"a": 1}, {"a": None}, "x"])
def test_a_malformed_index_is_refused(tmp_path: Path, places: object) -> None:
    index = tmp_path / "a.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(index)


@pytest.mark.parametrize(
    ("file", "save"), [("model.safetensors", save_safetensors), ("pytorch_model.bin", save_zip)]
)
def test_a_hugging_face_folder_is_one_checkpoint(
    tmp_path: Path, file: str, save: Callable[[dict[str, torch.Tensor], Path], Path]
) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save(state(), folder / file)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.name == "bert"
    assert_holds(checkpoint, state())


def test_another_folder_is_no_checkpoint(tmp_path: Path) -> None:
    save_zip(state(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="not one that a Hugging Face model"):
        open_checkpoint(tmp_path)


FOREIGN = {
    b"": "an empty file",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "a Git LFS pointer",
    b"<!DOCTYPE html><html></html>": "a web page",
    b"  <html>": "a web page",
    b"\x93NUMPY\x01\x00v\x00": r"a numpy array \(\.npy\)",
    b"\x89HDF\r\n\x1a\n\x00\x00": "an HDF5 file",
    b"GGUF\x03\x00\x00\x00": "a GGUF/GGML file",
    b"\x1f\x8b\x08\x00": "a gzip file",
    bytes(257) + b"ustar\x0000": "a tar archive",
    b"lr: 0.1\nepochs: 3\n": "a text file",
    b'{"lr": 0.1}': "a JSON file",
    b'{"lr": 0.': "looks like JSON but cannot be parsed",
    b"[" * 100_000: "looks like JSON but cannot be parsed",
    bytes(range(200, 256)) * 4: r"not a checkpoint \(unknown format\)",
}


@pytest.mark.parametrize("content", FOREIGN, ids=FOREIGN.values())
def test_foreign_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.pt: .*{FOREIGN[content]}") as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 1
    assert "\n" not in caught.value.problem


def test_a_numpy_archive_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(CheckpointError, match=r"a numpy archive \(\.npz\)"):
        open_checkpoint(tmp_path / "a.npz")


def test_another_zip_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/readme.txt", "hello")
    with pytest.raises(CheckpointError, match="a zip archive, but no torch checkpoint"):
        open_checkpoint(tmp_path / "a.pt")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("missing", "loop"):
        with pytest.raises(CheckpointError, match=f"{name}: (no such file|cannot be read)"):
            open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint("/dev/null")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("legacy", [False, True])
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int, legacy: bool) -> None:
    torch.save(
        state(),
        tmp_path / "a.pt",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=not legacy,
    )
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    for name, tensor in state().items():
        assert torch.equal(checkpoint.read_torch(name), tensor)


def test_a_class_that_is_not_installed_can_be_allowed(tmp_path: Path) -> None:
    code = b"\x80\x02}(X\x03\0\0\0cfgcabsent.module\nConfig\n)\x81}X\x01\0\0\0aK\x01sbu."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", code)
    with pytest.raises(UnsafeCheckpointError, match=r"absent\.module\.Config"):
        open_checkpoint(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no tensors under names"):  # but was read
        open_checkpoint(tmp_path / "a.pt", ReadOptions(allow_globals=("absent.module.Config",)))


@pytest.mark.parametrize("save", [save_zip, save_legacy, save_safetensors])
def test_tensors_of_different_shards_are_never_taken_for_one(tmp_path: Path, save: Any) -> None:
    tensors = {f"fc{k}.weight": torch.full((2, 2), float(k)) for k in range(4)}
    checkpoint = open_checkpoint(save_sharded(tensors, tmp_path, save))
    assert dict(checkpoint.aliases) == {}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read_torch(name), tensor)
