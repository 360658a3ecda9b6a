import io
import logging
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmerge.checkpoint import ReadOptions, open_checkpoint
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from tests.unit.checkpoint.archives import (
    Net,
    changed,
    in_json,
    loaded_by_torch,
    save_exported,
)

CONFIG = "model_weights_config.json"


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_exported(Net(), tmp_path_factory.mktemp("program") / "a.pt2", torch.randn(2, 4))


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def edited(name: str, **values: Any) -> Callable[[bytes], bytes | None]:
    """Change what the config says of one tensor: the record's name, or its geometry."""

    def change(config: Any) -> None:
        entry = config["config"][name]
        for key, value in values.items():
            (entry if key in entry else entry["tensor_meta"])[key] = value

    return in_json(change)


def test_weights_equal_those_that_torch_loads_in_the_models_order(program: Path) -> None:
    checkpoint, expected = open_checkpoint(program), loaded_by_torch(program)
    assert checkpoint.container == "exported program"
    assert list(checkpoint.tensors) == list(Net().state_dict())
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read_torch(name), tensor.detach())
        assert checkpoint.tensors[name].dtype == str(tensor.dtype).removeprefix("torch.")
    assert dict(checkpoint.aliases) == {"third.weight": "second.weight"}
    assert checkpoint.notes == ("ignored 2 entries that are no weights: scale, temporary",)


def test_a_changed_byte_changes_one_tensor_only(program: Path, tmp_path: Path) -> None:
    def change(content: bytes) -> bytes:
        return bytes([content[0] ^ 1]) + content[1:]

    other = open_checkpoint(changed(program, tmp_path / "b.pt2", {"weights/weight_0": change}))
    same = open_checkpoint(changed(program, tmp_path / "c.pt2", {}))
    first = open_checkpoint(program)
    digests = [{n: c.tensor_digest(n) for n in first.tensors} for c in (first, other, same)]
    assert digests[0] == digests[2]
    assert [n for n in digests[0] if digests[0][n] != digests[1][n]] == ["first.weight"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"path_name": "../../secret"}, "names a record outside its folder: '../../secret'"),
        ({"path_name": ".."}, "names a record outside its folder"),
        ({"path_name": "weight_99"}, r"names the record 'a/data/weights/weight_99', which is miss"),
        ({"storage_offset": {"as_int": 1}}, "'first.weight': a tensor reaches number 25 of 24"),
        ({"storage_offset": {"as_int": -1}}, "'first.weight': sizes"),
        ({"strides": [{"as_int": -4}, {"as_int": 1}]}, "'first.weight': sizes"),
        ({"strides": [{"as_int": 1}]}, "'first.weight': sizes"),
        ({"sizes": [{"as_int": 6}, {"as_int": 5}]}, "'first.weight': a tensor reaches number 25"),
        ({"sizes": [{"as_expr": {"expr_str": "exit()"}}]}, "truncated or damaged"),
        ({"dtype": 8}, "'first.weight': a tensor reaches number 24 of 12"),
        ({"dtype": 99}, "is sparse or has an unknown dtype"),
        ({"layout": 1}, "is sparse or has an unknown dtype"),
        ({"sizes": [{"as_int": 1 << 20}] * 2, "strides": [{"as_int": 0}] * 2}, "claims 1,099,"),
    ],
)
def test_tensors_that_leave_their_records_are_refused(
    program: Path, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = changed(program, tmp_path / "b.pt2", {CONFIG: edited("first.weight", **change)})
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("record", ["model.json", CONFIG, "model_constants_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"config": 3}', b"[" * 100_000])
def test_missing_and_senseless_descriptions_are_refused(
    program: Path, tmp_path: Path, record: str, content: bytes | None
) -> None:
    path = changed(program, tmp_path / "b.pt2", {record: lambda _: content})
    with pytest.raises(CheckpointError, match=r"truncated or damaged|compiled package"):
        open_checkpoint(path)


def test_a_truncated_program_is_refused(program: Path, tmp_path: Path) -> None:
    content = program.read_bytes()
    for length in range(4, len(content), len(content) // 40):
        (tmp_path / "b.pt2").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            open_checkpoint(tmp_path / "b.pt2")


def test_a_pickled_weight_is_read_and_a_payload_in_its_place_is_refused(
    program: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    pickled = edited("first.weight", use_pickle=True)
    values = torch.randn(6, 4)
    path = tmp_path / "b.pt2"
    changed(program, path, {CONFIG: pickled, "weights/weight_0": lambda _: saved(values)})
    assert torch.equal(open_checkpoint(path).read_torch("first.weight"), values)
    payload = saved(Payload(marker))
    changed(program, path, {CONFIG: pickled, "weights/weight_0": lambda _: payload})
    with pytest.raises(UnsafeCheckpointError, match=r"(posix|nt)\.mkdir") as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 4
    assert not marker.exists()


def test_a_payload_among_the_example_inputs_is_refused_which_torch_would_run(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # torch tells of it
    marker = tmp_path / "marker"
    payload = saved(((Payload(marker),), {}))
    path = changed(program, tmp_path / "b.pt2", {"sample_inputs/model.pt": lambda _: payload})
    with pytest.raises(UnsafeCheckpointError, match=r"(posix|nt)\.mkdir"):
        open_checkpoint(path)
    assert not marker.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.load(path)
    assert marker.exists()


def test_the_layouts_of_older_versions_are_read(program: Path, tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.randn(3, 2), "fc.bias": torch.randn(3)}

    def rewritten(name: str, state: str, content: bytes) -> Path:
        with (
            zipfile.ZipFile(program) as source,
            zipfile.ZipFile(tmp_path / name, "w") as target,
        ):
            for record in source.namelist():
                if "weights_config" not in record:
                    target.writestr(record, source.read(record))
            target.writestr(state, content)
        return tmp_path / name

    newer = rewritten("b.pt2", "a/data/weights/model.pt", saved(tensors))
    older = tmp_path / "c.pt2"
    with zipfile.ZipFile(older, "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", saved(tensors))
    for path in (newer, older):
        checkpoint = open_checkpoint(path)
        assert list(checkpoint.tensors) == ["fc.weight", "fc.bias"]
        assert torch.equal(checkpoint.read_torch("fc.weight"), tensors["fc.weight"])


def test_other_byte_orders_and_compiled_packages_are_refused(program: Path, tmp_path: Path) -> None:
    path = changed(program, tmp_path / "b.pt2", {"byteorder": lambda _: b"big"})
    with pytest.raises(CheckpointError, match="numbers are big-endian"):
        open_checkpoint(path)
    path = changed(program, tmp_path / "b.pt2", {"models/model.json": lambda _: None})
    with pytest.raises(CheckpointError, match="a compiled package"):
        open_checkpoint(path)


def test_records_that_come_twice_or_compressed_are_refused(program: Path, tmp_path: Path) -> None:
    path = changed(program, tmp_path / "b.pt2", {})
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("a/data/weights/weight_0", bytes(96))
    with pytest.raises(CheckpointError, match="'a/data/weights/weight_0' more than once"):
        open_checkpoint(path)
    with (
        zipfile.ZipFile(program) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="is compressed or encrypted"):
        open_checkpoint(path)


def test_one_of_several_programs_is_chosen_by_key(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.pt2"
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
            if "model" in name:
                target.writestr(
                    name.replace("model", "other").replace("others/", "models/"), source.read(name)
                )
    with pytest.raises(CheckpointError, match=r"several state dicts: 'model' \(15 tensors\)"):
        open_checkpoint(path)
    chosen = open_checkpoint(path, ReadOptions(key="other"))
    assert chosen.location == "other"
    assert chosen.program is not None
