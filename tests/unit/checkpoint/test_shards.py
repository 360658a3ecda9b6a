import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedmerge.checkpoint import (
    check_output,
    expand_paths,
    open_checkpoint,
    parse_size,
    read_record,
    write_model,
    written_path,
)
from fedmerge.errors import CheckpointError, UsageError
from fedmerge.values import Array, TensorInfo
from tests.unit.checkpoint.samples import save_zip, state

INFOS = {
    "z.weight": TensorInfo((5, 2), "float32"),  # 40 bytes
    "a.half": TensorInfo((3,), "float16"),  # 6
    "m.steps": TensorInfo((), "int64"),  # 8
    "b.large": TensorInfo((100,), "float32"),  # 400
    "c.weight": TensorInfo((4,), "float32"),  # 16
}


def values(version: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(version)
    arrays: dict[str, Array] = {
        name: rng.normal(size=info.shape).astype(np.float32) for name, info in INFOS.items()
    }
    return arrays | {"m.steps": np.array(version)}


def write(path: Path, version: int = 0, **changes: Any) -> Path:
    """Write a model whose values and record tell its version; return its index."""

    def record(digests: Mapping[str, str]) -> dict[str, Any]:
        return {"fedmerge": "x", "version": version, "tensors": dict(digests)}

    options: dict[str, Any] = {"record": record, "shard_size": 50} | changes
    write_model(path, INFOS, values(version).__getitem__, **options)
    return written_path(path, sharded=True)


def version_of(index: Path) -> int:
    """Return the version of a model all of whose tensors agree with its record."""
    record, checkpoint = read_record(index), open_checkpoint(index)
    assert list(checkpoint.tensors) == list(INFOS)
    for name in checkpoint.tensors:
        assert checkpoint.tensor_digest(name) == record["tensors"][name]
    assert int(checkpoint.read("m.steps")) == record["version"]
    return int(record["version"])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), (7, 7), ("2GB", 2 * 10**9), ("2 gb", 2 * 10**9), ("500MB", 5 * 10**8),
     ("1GiB", 2**30), ("0.5KiB", 512), ("3b", 3)],
)  # fmt: skip
def test_sizes_have_decimal_and_binary_units(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2XB", "-1", "0", "0.1", "1e9", "2GB2", "nan", -5])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match=r"`shard_size` is '.*', expected a number of bytes"):
        parse_size(text)


def test_shards_hold_the_tensors_of_one_file_under_the_usual_names(tmp_path: Path) -> None:
    index = write(tmp_path / "global.safetensors")
    write(tmp_path / "whole.safetensors", shard_size=None)
    content = json.loads(index.read_text())
    names = [f"global-0000{k}-of-00004.safetensors" for k in (1, 2, 3, 4)]
    assert content["metadata"]["total_size"] == 470
    assert content["weight_map"] == {
        "z.weight": names[0],
        "a.half": names[0],
        "m.steps": names[1],
        "b.large": names[2],  # larger than a shard may be: alone in one
        "c.weight": names[3],
    }
    assert files(tmp_path) == [*names, index.name, "whole.safetensors"]
    shards = {name: t for shard in names for name, t in load_file(tmp_path / shard).items()}
    whole = load_file(tmp_path / "whole.safetensors")
    assert set(shards) == set(whole) == set(INFOS)
    for name, tensor in whole.items():
        assert torch.equal(shards[name], tensor)
        assert shards[name].dtype == tensor.dtype
    assert version_of(index) == 0


def test_one_shard_that_holds_all_has_an_index_too(tmp_path: Path) -> None:
    index = write(tmp_path / "g.safetensors", shard_size=10**9)
    assert files(tmp_path) == ["g-00001-of-00001.safetensors", index.name]
    assert version_of(index) == 0


def test_the_same_values_give_the_same_bytes_under_any_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "g.safetensors")
    write(tmp_path / "other.safetensors")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for number in (1, 2, 3, 4):
        shard = f"-0000{number}-of-00004.safetensors"
        one, other = (tmp_path / f"a/g{shard}"), (tmp_path / f"other{shard}")
        assert one.read_bytes() == other.read_bytes()


def test_a_sharded_model_without_a_record_has_none(tmp_path: Path) -> None:
    index = write(tmp_path / "g.safetensors", record=None)
    with pytest.raises(CheckpointError, match=r"no merge record \(no 'fedmerge' in its metadata"):
        read_record(index)
    index.write_text('{"metadata": {"fedmerge": [1]}, "weight_map": {"a": "b"}}')
    with pytest.raises(CheckpointError, match="its merge record is no JSON object"):
        read_record(index)


@pytest.mark.parametrize(
    "name",
    ["g.safetensors", "g.safetensors.index.json", "g-00001-of-00004.safetensors",
     "g-00007-of-00009.safetensors"],
)  # fmt: skip
def test_any_part_of_an_older_output_needs_force(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("old")
    with pytest.raises(UsageError, match=f"{name}: exists already"):
        write(tmp_path / "g.safetensors")
    assert files(tmp_path) == [name]
    write(tmp_path / "g.safetensors", force=True)
    assert len(files(tmp_path)) == 5  # nothing stale is left


def test_files_that_only_look_alike_are_left_alone(tmp_path: Path) -> None:
    alike = ["g-1-of-4.safetensors", "gg-00001-of-00004.safetensors", "g-00001-of-00004.bin"]
    for name in alike:
        (tmp_path / name).write_text("mine")
    write(tmp_path / "g.safetensors")
    write(tmp_path / "g.safetensors", force=True, shard_size=1000)
    assert [(tmp_path / name).read_text() for name in alike] == ["mine"] * 3
    assert len(files(tmp_path)) == 5


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt"])
def test_torch_files_are_not_sharded(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UsageError, match="`shard_size` writes safetensors only") as caught:
        write(tmp_path / f"g{suffix}")
    assert caught.value.hint == "let the output end in .safetensors"
    assert files(tmp_path) == []


def test_an_output_equal_to_an_input_is_refused_even_with_force(tmp_path: Path) -> None:
    index = write(tmp_path / "g.safetensors")
    shard = tmp_path / "g-00002-of-00004.safetensors"
    for source in (index, shard):
        with pytest.raises(UsageError, match="the output is also an input"):
            check_output(tmp_path / "g.safetensors", inputs=[source], force=True, sharded=True)
    check_output(tmp_path / "h.safetensors", inputs=[index], force=True, sharded=True)


@pytest.mark.parametrize("before", [50, 1000], ids=["same names", "other names"])
def test_a_stop_at_any_rename_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    path = tmp_path / "g.safetensors"
    replace = os.replace
    versions = []
    for stop in range(12):
        index = write(path, version=0, shard_size=before, force=True)
        calls: list[object] = []

        def stopping(*paths: Any, calls: list[object] = calls, stop: int = stop) -> None:
            if len(calls) == stop:
                raise KeyboardInterrupt("stop")
            calls.append(paths)
            replace(*paths)

        monkeypatch.setattr(os, "replace", stopping)
        try:
            write(path, version=1, force=True)
        except KeyboardInterrupt:
            assert version_of(index) == 0
        versions.append(version_of(index))
        monkeypatch.undo()
    renames = 6 if before == 50 else 5  # shards and index; once more where shards are replaced
    assert versions == [0] * renames + [1] * (12 - renames)


def test_without_hard_links_a_stop_leaves_no_mixed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write(tmp_path / "g.safetensors")

    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    write(tmp_path / "g.safetensors", version=1, force=True)
    assert version_of(index) == 1
    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "g.safetensors", version=2, force=True)
    assert not index.exists()


def test_an_error_half_way_leaves_the_old_model_and_nothing_else(tmp_path: Path) -> None:
    index = write(tmp_path / "g.safetensors")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(name: str) -> Array:
        if name == "c.weight":  # of the last shard
            raise KeyboardInterrupt("stop")
        return values(1)[name]

    with pytest.raises(KeyboardInterrupt, match="stop"):
        write_model(tmp_path / "g.safetensors", INFOS, interrupted, force=True, shard_size=50)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert version_of(index) == 0


def test_a_merged_model_among_clients_is_no_client(tmp_path: Path) -> None:
    clients = [save_zip(state(seed), tmp_path / f"c{seed}.pt") for seed in (1, 2)]
    write(tmp_path / "g.safetensors")
    assert expand_paths([tmp_path]) == clients
    alone = tmp_path / "alone"
    alone.mkdir()
    write(alone / "g.safetensors")
    assert expand_paths([alone]) == [alone]
    assert list(open_checkpoint(alone).tensors) == list(INFOS)
