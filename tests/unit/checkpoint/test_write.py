import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedmerge.checkpoint import (
    open_checkpoint,
    read_record,
    record_path,
    to_torch,
    values_digest,
    write_model,
    write_text,
)
from fedmerge.errors import CheckpointError, UsageError
from fedmerge.values import Array, TensorInfo

TORCH = [".pt", ".pth", ".bin", ".ckpt"]
ALL = [*TORCH, ".safetensors"]
INFOS = {
    "model.flag": TensorInfo((3,), "bool"),
    "model.fc.weight": TensorInfo((2, 3), "float32"),
    "model.half": TensorInfo((3,), "float16"),
    "model.brain": TensorInfo((5,), "bfloat16"),
    "model.steps": TensorInfo((), "int64"),
    "model.wide": TensorInfo((2,), "float64"),
    "model.none": TensorInfo((0, 4), "float32"),
    "model.tied": TensorInfo((2, 3), "float32"),
}
VALUES: dict[str, Array] = {
    "model.flag": np.array([True, False, True]),
    "model.fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.half": np.array([1.5, -2, 1e-3], dtype=np.float32),
    "model.brain": np.array([1, 2, 3, 4, 5.125], dtype=np.float32),
    "model.steps": np.array(7),
    "model.wide": np.array([0.1, 0.2]),
    "model.none": np.zeros((0, 4), dtype=np.float32),
    "model.tied": np.arange(6, dtype=np.float32).reshape(2, 3),
}
ALIASES = {"model.tied": "model.fc.weight"}


def record(digests: Mapping[str, str]) -> dict[str, Any]:
    return {"seed": 0, "name": 'Zürich "x"', "map": [[1, 2], [3]], "tensors": dict(digests)}


def write(path: Path, **changes: Any) -> dict[str, str]:
    options: dict[str, Any] = {"aliases": ALIASES, "record": record} | changes
    return write_model(path, INFOS, VALUES.__getitem__, **options)


def load(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    loaded = torch.load(path, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", ALL)
def test_what_is_written_is_read_back_by_the_libraries_themselves(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"global{suffix}"
    digests = write(path)
    tensors = load(path)
    assert set(tensors) == set(digests) == set(INFOS)
    for name, info in INFOS.items():
        expected = torch.from_numpy(VALUES[name]).to(getattr(torch, info.dtype))
        assert torch.equal(tensors[name], expected)
        assert tensors[name].dtype == expected.dtype
    assert torch.equal(tensors["model.tied"], tensors["model.fc.weight"])


@pytest.mark.parametrize("suffix", ALL)
def test_what_is_written_is_read_back_by_us_in_the_same_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"global{suffix}"
    digests = write(path)
    checkpoint = open_checkpoint(path)
    names = [checkpoint.output_name(name) for name in checkpoint.tensors]
    assert names == list(INFOS)
    for name in checkpoint.tensors:
        assert checkpoint.tensor_digest(name) == digests[checkpoint.output_name(name)]
    assert checkpoint.read("fc.weight").tolist() == VALUES["model.fc.weight"].tolist()


def test_digests_are_of_the_bytes_in_the_written_dtype(tmp_path: Path) -> None:
    digests = write(tmp_path / "a.safetensors")
    half = VALUES["model.half"].astype("<f2").tobytes()
    assert digests["model.half"] == hashlib.sha256(half).hexdigest()
    assert digests == write(tmp_path / "a.pt")


def test_aliases_share_memory_in_torch_files_only(tmp_path: Path) -> None:
    write(tmp_path / "a.pt")
    tensors = load(tmp_path / "a.pt")
    assert tensors["model.tied"].data_ptr() == tensors["model.fc.weight"].data_ptr()
    assert open_checkpoint(tmp_path / "a.pt").aliases == {"tied": "fc.weight"}
    write(tmp_path / "a.safetensors")
    assert open_checkpoint(tmp_path / "a.safetensors").aliases == {}


def test_arrays_that_share_memory_by_chance_are_not_tied(tmp_path: Path) -> None:
    same = np.ones(3, dtype=np.float32)
    infos = dict.fromkeys(["a", "b"], TensorInfo((3,), "float32"))
    write_model(tmp_path / "x.pt", infos, lambda _: same)
    assert open_checkpoint(tmp_path / "x.pt").aliases == {}


def test_read_only_and_strided_arrays_are_written(tmp_path: Path) -> None:
    frozen = np.arange(6, dtype=np.float32).reshape(2, 3).T
    frozen.flags.writeable = False
    write_model(tmp_path / "x.pt", {"a": TensorInfo((3, 2), "float32")}, lambda _: frozen)
    assert load(tmp_path / "x.pt")["a"].tolist() == frozen.tolist()


def test_safetensors_are_aligned_and_say_they_are_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    sizes = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("suffix", ALL)
def test_the_bytes_do_not_depend_on_the_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "sub").mkdir()
    paths = [tmp_path / f"a{suffix}", tmp_path / "sub" / f"another-name{suffix}"]
    for path in paths:
        write(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    if suffix != ".safetensors":
        first, second = (record_path(path).read_bytes() for path in paths)
        assert first == second


@pytest.mark.parametrize("suffix", ALL)
def test_the_bytes_depend_on_the_values(tmp_path: Path, suffix: str) -> None:
    info = {"a": TensorInfo((2,), "float32")}
    write_model(tmp_path / f"x{suffix}", info, lambda _: np.full(2, 1.0))
    write_model(tmp_path / f"y{suffix}", info, lambda _: np.full(2, 2.0))
    assert (tmp_path / f"x{suffix}").read_bytes() != (tmp_path / f"y{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", ALL)
def test_the_record_is_inside_or_beside_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"global{suffix}"
    digests = write(path)
    assert read_record(path) == record(digests)
    beside = [] if suffix == ".safetensors" else [f"global{suffix}.json"]
    assert files(tmp_path) == [path.name, *beside]


def test_the_record_is_readable_text_with_lists_of_numbers_on_one_line(tmp_path: Path) -> None:
    infos = {"w": TensorInfo((1,), "float32")}
    write_model(
        tmp_path / "a.pt",
        infos,
        lambda _: np.ones(1),
        record=lambda _: {"z": "ü[\n1]", "a": [1, -2, 3.5], "e": [], "n": [[1], ["x", 2]]},
    )
    text = record_path(tmp_path / "a.pt").read_text("utf-8")
    assert text == (
        '{\n "z": "ü[\\n1]",\n "a": [1, -2, 3.5],\n "e": [],\n'
        ' "n": [\n  [1],\n  [\n   "x",\n   2\n  ]\n ]\n}\n'
    )


def test_values_that_do_not_fit_the_dtype_are_refused(tmp_path: Path) -> None:
    infos = {"w": TensorInfo((3,), "float16")}
    with pytest.raises(CheckpointError, match="2 values of 'w' do not fit into float16"):
        write_model(tmp_path / "a.pt", infos, lambda _: np.array([1e6, 1, np.nan]))
    assert files(tmp_path) == []


def test_a_tensor_may_not_be_called_like_the_metadata(tmp_path: Path) -> None:
    infos = {"__metadata__": TensorInfo((1,), "float32")}
    with pytest.raises(CheckpointError, match="no tensor called '__metadata__'"):
        write_model(tmp_path / "a.safetensors", infos, lambda _: np.ones(1))


@pytest.mark.parametrize("suffix", ALL)
def test_an_error_half_way_leaves_the_old_files_and_nothing_else(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"global{suffix}"
    write(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def interrupted(name: str) -> Array:
        if name == "model.brain":
            raise KeyboardInterrupt("stop")
        return VALUES[name]

    def broken(digests: Mapping[str, str]) -> dict[str, Any]:
        raise ZeroDivisionError("broken")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        write_model(path, INFOS, interrupted, record=record, force=True)
    with pytest.raises(ZeroDivisionError, match="broken"):
        write(path, record=broken, force=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_system_error_is_ours_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, step: str
) -> None:
    path = tmp_path / f"global{suffix}"
    write(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        write(path, force=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("step", "force", "hidden"), [("link", False, 2), ("replace", True, 4)])
def test_both_files_are_complete_before_either_gets_its_name(
    step: str, force: bool, hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the hidden files are also the old model and record."""
    if force:
        write(tmp_path / "global.pt")
    seen: list[int] = []
    give = getattr(os, step)

    def watched(source: Path, target: Path) -> None:
        there = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        seen.append(sum(path.stat().st_size > 0 for path in there))
        give(source, target)

    monkeypatch.setattr(os, step, watched)
    write(tmp_path / "global.pt", force=force)
    assert seen == [hidden, hidden - force]
    assert files(tmp_path) == ["global.pt", "global.pt.json"]


@pytest.mark.skipif(os.name == "nt", reason="no file modes there")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_files_mode_follows_the_umask(tmp_path: Path, suffix: str) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / f"a{suffix}")
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o640}


def test_an_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("old")
    with pytest.raises(UsageError, match=r"a\.pt: exists already"):
        write(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_text() == "old"
    write(tmp_path / "a.pt", force=True)
    assert "model.steps" in load(tmp_path / "a.pt")


def test_a_file_written_without_a_record_does_not_keep_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "a.pt")
    write(tmp_path / "a.pt", record=None, force=True)
    assert files(tmp_path) == ["a.pt"]
    with pytest.raises(CheckpointError, match=r"no merge record \(no a\.pt\.json beside it\)"):
        read_record(tmp_path / "a.pt")


def test_a_record_that_is_missing_or_damaged_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, record=None)
    with pytest.raises(CheckpointError, match=r"no merge record \(no 'fedmerge' in its metadata"):
        read_record(path)
    write(tmp_path / "a.pt")
    for text in (b'{"seed": ', b"[1]", b"\xff\xfe", b"[" * 100_000):
        record_path(tmp_path / "a.pt").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"a\.pt\.json: truncated or damaged"):
            read_record(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="no such file"):
        read_record(tmp_path / "missing.pt")


def test_an_array_has_the_digest_and_the_values_that_are_written(tmp_path: Path) -> None:
    digests = write(tmp_path / "a.pt")
    tensors = load(tmp_path / "a.pt")
    for name, info in INFOS.items():
        assert values_digest(VALUES[name], info.dtype) == digests[name]
        converted = to_torch(VALUES[name], info.dtype)
        assert torch.equal(converted, tensors[name])
        assert converted.dtype == tensors[name].dtype
    array = np.zeros(2, dtype=np.float32)
    to_torch(array, "float32")[0] = 1
    assert array.tolist() == [0, 0]


def test_a_text_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "ä", force=False)
    write_text(path, "ö", force=True)
    assert path.read_bytes() == "ö".encode()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"plan\.json: cannot be written \(No space"):
        write_text(path, "ü", force=True)
    assert path.read_bytes() == "ö".encode()
    assert files(tmp_path) == ["plan.json"]
