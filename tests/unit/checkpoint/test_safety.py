import argparse
import io
import itertools
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmerge.checkpoint import (
    UNRESOLVED,
    PickleError,
    ReadOptions,
    SourceFile,
    Trust,
    open_checkpoint,
    read_pickle,
)
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from tests.unit.checkpoint.samples import save_legacy, save_zip, state


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def assert_refused(path: Path, marker: Path, asks: str) -> UnsafeCheckpointError:
    with pytest.raises(UnsafeCheckpointError, match=asks) as caught:
        open_checkpoint(path)
    assert not marker.exists()
    assert caught.value.exit_code == 4
    return caught.value


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_raw_pickle_is_never_run(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Payload(tmp_path / "marker"), protocol))
    error = assert_refused(tmp_path / "a.pt", tmp_path / "marker", r"asks for .* (posix|nt)\.mkdir")
    assert "do not load" in error.hint


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_never_runs_what_it_asks_for(
    tmp_path: Path, protocol: int, legacy: bool
) -> None:
    content = {"state_dict": state(), "extra": Payload(tmp_path / "marker")}
    torch.save(
        content,
        tmp_path / "a.pt",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=not legacy,
    )
    assert_refused(tmp_path / "a.pt", tmp_path / "marker", r"asks for .* (posix|nt)\.mkdir")


def test_a_payload_in_any_pickle_of_a_legacy_file_is_refused(tmp_path: Path) -> None:
    whole = save_legacy(state(), tmp_path / "whole.pt").read_bytes()
    stream = io.BytesIO(whole)
    cuts = [stream.tell() for _ in range(3) if pickle.load(stream) is not None]
    payload = pickle.dumps(Payload(tmp_path / "marker"), 2)
    for begin, end in itertools.pairwise(cuts):
        (tmp_path / "a.pt").write_bytes(whole[:begin] + payload + whole[end:])
        assert_refused(tmp_path / "a.pt", tmp_path / "marker", r"mkdir")


def test_hand_written_protocol_0_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    (tmp_path / "a.pt").write_bytes(content)
    assert_refused(tmp_path / "a.pt", marker, r"os\.system")
    (tmp_path / "a.pt").write_bytes(f"(S'touch {marker}'\nios\nsystem\n.".encode())
    assert_refused(tmp_path / "a.pt", marker, r"os\.system")


def test_a_payload_behind_a_harmless_pickle_is_refused(tmp_path: Path) -> None:
    content = pickle.dumps({"a": 1}) + pickle.dumps(Payload(tmp_path / "marker"))
    (tmp_path / "a.pt").write_bytes(content)
    assert_refused(tmp_path / "a.pt", tmp_path / "marker", "mkdir")


def test_a_payload_in_a_cut_pickle_is_refused(tmp_path: Path) -> None:
    content = pickle.dumps([Payload(tmp_path / "marker"), "x" * 100])
    (tmp_path / "a.pt").write_bytes(content[:-50])
    assert_refused(tmp_path / "a.pt", tmp_path / "marker", "mkdir")


def test_a_blocked_module_stays_refused_even_if_allowed(tmp_path: Path) -> None:
    save_zip({"a": state(), "b": Payload(tmp_path / "marker")}, tmp_path / "a.pt")
    allow = ReadOptions(allow_globals=("posix.mkdir",))
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.mkdir"):
        open_checkpoint(tmp_path / "a.pt", allow)
    assert not (tmp_path / "marker").exists()


def test_a_harmless_class_is_refused_until_it_is_allowed_by_name(tmp_path: Path) -> None:
    save_zip({"args": argparse.Namespace(lr=0.1), "net": state()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"argparse\.Namespace") as caught:
        open_checkpoint(tmp_path / "a.pt")
    assert "`allow_global=argparse.Namespace`" in caught.value.hint
    allow = ReadOptions(allow_globals=("argparse.Namespace",))
    assert open_checkpoint(tmp_path / "a.pt", allow).location == "net"
    with pytest.raises(UnsafeCheckpointError, match=r"argparse\.Namespace"):
        open_checkpoint(tmp_path / "a.pt")


def test_a_refusal_names_all_that_must_be_allowed(tmp_path: Path) -> None:
    save_zip({"best": np.float64(0.5), "net": state()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match="numpy") as caught:
        open_checkpoint(tmp_path / "a.pt")
    names = tuple(re.findall("`allow_global=([^`]+)`", caught.value.hint))
    assert len(names) == 2
    assert open_checkpoint(tmp_path / "a.pt", ReadOptions(allow_globals=names)).location == "net"
    with pytest.raises(UnsafeCheckpointError, match="numpy"):
        open_checkpoint(tmp_path / "a.pt", ReadOptions(allow_globals=names[:1]))


def test_nothing_that_is_allowed_is_imported_or_called(tmp_path: Path) -> None:
    content = {"net": state(), "extra": Payload(tmp_path / "marker")}
    path = save_zip(content, tmp_path / "a.pt")
    name = b"cposix\nmkdir\n"
    with zipfile.ZipFile(path) as archive:
        records = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for entry, record in records.items():
            archive.writestr(entry, record.replace(name, b"cpathlib\nmkdir\n"))
    allow = ReadOptions(allow_globals=("pathlib.mkdir",))
    assert open_checkpoint(path, allow).location == "net"
    assert not (tmp_path / "marker").exists()


def test_a_pickle_without_globals_is_no_checkpoint(tmp_path: Path) -> None:
    for protocol in range(6):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps({"epoch": 3}, protocol))
        with pytest.raises(CheckpointError, match="a pickle but no torch checkpoint") as caught:
            open_checkpoint(tmp_path / "a.pkl")
        assert caught.value.exit_code == 1


def test_even_plain_globals_of_a_raw_pickle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(OrderedDict(a=1)))
    with pytest.raises(UnsafeCheckpointError, match=r"collections\.OrderedDict"):
        open_checkpoint(tmp_path / "a.pkl")


def asked_by(content: bytes, path: Path) -> tuple[str, ...]:
    """Return the names that a pickle asks for, whatever else is wrong with it."""
    path.write_bytes(content)
    try:
        return read_pickle(SourceFile.of(path).whole, Trust()).asked
    except PickleError as error:
        return error.asked


def test_names_are_resolved_through_the_memo(tmp_path: Path) -> None:
    module, name = b"\x8c\x02os", b"\x8c\x06system"
    memo = b"\x80\x04" + module + b"\x94" + name + b"\x94\x93\x30h\x00h\x01\x93."
    assert asked_by(memo, tmp_path / "a") == ("os.system",)
    hidden = b"\x80\x04" + module + b"K\x01\x93."
    assert asked_by(hidden, tmp_path / "a") == (UNRESOLVED,)


def test_an_extension_code_counts_as_a_global(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02\x82\xf0.")
    assert_refused(tmp_path / "a.pkl", tmp_path / "marker", r"copyreg\.extension 240")


def test_the_reader_agrees_with_pickle_on_what_is_asked_for(tmp_path: Path) -> None:
    asked: list[str] = []

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.append(f"{module}.{name}")
            return super().find_class(module, name)

    content = [OrderedDict(a=argparse.Namespace(b=np.zeros(2))), OrderedDict(), np.float32(1)]
    for protocol in range(2, 6):
        asked.clear()
        data = pickle.dumps(content, protocol)
        Recorder(io.BytesIO(data)).load()
        found = asked_by(data, tmp_path / "a")
        assert set(found) == {name.replace("__builtin__", "builtins") for name in asked}


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    save_zip(state(), tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="is compressed or encrypted"):
        open_checkpoint(tmp_path / "b.pt")


def test_records_larger_than_the_file_are_refused(tmp_path: Path) -> None:
    content = bytearray(save_zip(state(), tmp_path / "a.pt").read_bytes())
    entry = content.index(b"PK\x01\x02")
    struct.pack_into("<II", content, entry + 20, 1 << 30, 1 << 30)
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="claim more bytes than the file has"):
        open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("save", [save_zip, save_legacy])
def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path, save: Any) -> None:
    save({"fc.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'fc\.weight' claims 1,099,511,627,776 numbers"):
        open_checkpoint(tmp_path / "a.pt")


def test_a_cyclic_or_very_deep_file_is_searched_without_harm(tmp_path: Path) -> None:
    cyclic: dict[str, Any] = {"net": state()}
    cyclic["self"] = cyclic
    assert open_checkpoint(save_zip(cyclic, tmp_path / "a.pt")).location == "net"
    depth = 100_000
    data = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    with zipfile.ZipFile(save_zip({}, tmp_path / "b.pt")) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        for name, content in records.items():
            archive.writestr(name, data if name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError, match="holds no tensors under names"):
        open_checkpoint(tmp_path / "b.pt")
