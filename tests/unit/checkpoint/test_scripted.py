import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmerge.checkpoint import open_checkpoint, torchscript
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from tests.unit.checkpoint.archives import Net, changed, loaded_by_torch, save_scripted


class Parts(nn.Module):
    """A module used under two names, lists and numbers among the attributes, no bias."""

    sizes: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU())
        self.two = self.one
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.sizes = [1, 2]
        self.note = "text"
        self.plain = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) + self.two(x)
        for head in self.heads:
            x = x + head(x).sum() * self.sizes[0]
        return x + self.plain.sum()


def scripted(build: Callable[[], nn.Module]) -> Callable[[Path], Path]:
    return lambda path: save_scripted(build().eval(), path)


MODULES: dict[str, Callable[[Path], Path]] = {
    "traced": lambda path: save_scripted(Net().eval(), path, torch.randn(2, 4)),
    "sequential": scripted(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))),
    "lstm": scripted(lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True)),
    "embedding": scripted(lambda: nn.Embedding(5, 3)),
    "attention": scripted(lambda: nn.TransformerEncoderLayer(8, 2)),
    "shared parts": scripted(Parts),
}


@pytest.mark.parametrize("name", MODULES)
def test_names_and_values_equal_those_that_torch_loads(tmp_path: Path, name: str) -> None:
    path = MODULES[name](tmp_path / "a.pt")
    checkpoint, expected = open_checkpoint(path), loaded_by_torch(path)
    assert checkpoint.container == "TorchScript"
    assert list(checkpoint.tensors) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.read_torch(key), tensor)


def test_shared_tensors_stay_shared(tmp_path: Path) -> None:
    traced = open_checkpoint(MODULES["traced"](tmp_path / "a.pt"))
    assert dict(traced.aliases) == {"third.weight": "second.weight"}
    parts = open_checkpoint(MODULES["shared parts"](tmp_path / "b.pt"))
    assert dict(parts.aliases) == {"two.0.weight": "one.0.weight"}


def test_a_changed_byte_changes_its_tensor(tmp_path: Path) -> None:
    path = MODULES["embedding"](tmp_path / "a.pt")
    other = changed(path, tmp_path / "b.pt", {"data/0": lambda c: bytes([c[0] ^ 1]) + c[1:]})
    first, second = (open_checkpoint(p).read_torch("weight") for p in (path, other))
    assert int((first != second).sum()) == 1


def test_a_frozen_archive_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit: Any = torch.jit
        module = jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval())
        jit.save(jit.freeze(module), str(tmp_path / "a.pt"))
    with pytest.raises(CheckpointError, match="a frozen TorchScript archive") as caught:
        open_checkpoint(tmp_path / "a.pt")
    assert "before torch.jit.freeze" in caught.value.hint


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    content = MODULES["embedding"](tmp_path / "a.pt").read_bytes()
    for length in range(4, len(content), len(content) // 40):
        (tmp_path / "b.pt").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            open_checkpoint(tmp_path / "b.pt")


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("nested", [False, True])
def test_a_payload_is_refused(tmp_path: Path, nested: bool) -> None:
    marker = tmp_path / "marker"
    payload = pickle.dumps([{"a": Payload(marker)}] if nested else Payload(marker), 2)
    path = MODULES["embedding"](tmp_path / "a.pt")
    path = changed(path, tmp_path / "b.pt", {"data.pkl": lambda _: payload})
    with pytest.raises(UnsafeCheckpointError, match=r"(posix|nt)\.mkdir") as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 4
    assert not marker.exists()


def test_a_payload_inside_the_module_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = MODULES["embedding"](tmp_path / "a.pt")
    inserted = pickle.dumps(Payload(marker), 2)[2:-1]  # without its frame

    def change(content: bytes) -> bytes:
        place = content.index(b"X\x06\x00\x00\x00weight")
        return content[:place] + b"X\x01\x00\x00\x00x" + inserted + content[place:]

    with pytest.raises(UnsafeCheckpointError, match=r"(posix|nt)\.mkdir"):
        open_checkpoint(changed(path, tmp_path / "b.pt", {"data.pkl": change}))
    assert not marker.exists()


def test_names_under_torch_are_inert_whatever_they_resemble(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    call = f"c__torch__.os\nmkdir\n(X{chr(len(str(marker)))}\0\0\0{marker}tR.".encode("latin-1")
    path = MODULES["embedding"](tmp_path / "a.pt")
    path = changed(path, tmp_path / "b.pt", {"data.pkl": lambda _: b"\x80\x02" + call})
    with pytest.raises(CheckpointError, match="without parameters"):
        open_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data.pkl": lambda _: None}, "'a/data.pkl' is missing"),
        ({"data/0": lambda _: None}, "'a/data/0' is missing"),
        ({"data/0": lambda c: c[:-4]}, "'a/data/0' has 56 bytes, too few for 15"),
        ({"data.pkl": lambda _: b"\x80\x02K\x01."}, "holds no module"),
    ],
)
def test_archives_that_contradict_themselves_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = MODULES["embedding"](tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(changed(path, tmp_path / "b.pt", changes))


MODULE = b"c__torch__.torch.nn.modules.sparse\nEmbedding\n)\x81"


def built(attributes: bytes) -> bytes:
    return MODULE + b"}" + attributes + b"b"


def test_a_module_inside_itself_is_met_once(tmp_path: Path) -> None:
    cyclic = b"\x80\x02" + MODULE + b"q\x00}X\x01\x00\x00\x00ah\x00sb."
    path = MODULES["embedding"](tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="without parameters"):
        open_checkpoint(changed(path, tmp_path / "b.pt", {"data.pkl": lambda _: cyclic}))


def test_few_modules_that_stand_for_very_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchscript, "_MOST_ATTRIBUTES", 1000)
    content = built(b"")
    for level in range(20):  # each holds the one before twice
        memo = bytes([level])
        twice = b"X\x01\x00\x00\x00ah" + memo + b"sX\x01\x00\x00\x00bh" + memo + b"s"
        content += b"q" + memo + built(twice)
    many = b"\x80\x02" + content + b"."
    path = MODULES["embedding"](tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="more than 1,000 attributes"):
        open_checkpoint(changed(path, tmp_path / "b.pt", {"data.pkl": lambda _: many}))
