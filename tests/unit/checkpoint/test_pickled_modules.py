"""Whole modules of `torch.save(model)` are read as their state dicts are; nothing of them runs."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmerge.checkpoint import Checkpoint, ReadOptions, open_checkpoint
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from tests.model_zoo import ZOO as BY_CODE
from tests.unit.checkpoint.archives import Net
from tests.unit.checkpoint.samples import save_legacy, save_zip
from tests.zoo import ZOO

SAVES: list[Callable[[object, Path], Path]] = [save_zip, save_legacy]
NETS: dict[str, Callable[[], nn.Module]] = {
    "views, ties and temporary buffers": Net,
    "data parallel": lambda: nn.DataParallel(Net()),
    "functions as attributes": lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"),
    "lists of parameters": lambda: nn.ModuleList([nn.ParameterList([torch.randn(2, 3)])]),
    "half precision": lambda: nn.Linear(3, 2).half(),
    **{name: ZOO[name].build for name in ("lenet", "vgg with batch norm", "lstm, 2 layers")},
    **{name: BY_CODE[name].build for name in list(BY_CODE)[:3]},
}


def assert_equal(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    assert list(checkpoint.tensors) == list(state)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.read_torch(name), tensor), name


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", NETS)
def test_a_module_is_read_as_its_state_dict(tmp_path: Path, name: str, save: Any) -> None:
    net = NETS[name]()
    checkpoint = open_checkpoint(save(net, tmp_path / "a.pt"))
    plain = open_checkpoint(save(net.state_dict(), tmp_path / "b.pt"))
    assert_equal(checkpoint, {name: plain.read_torch(name) for name in plain.tensors})
    assert checkpoint.aliases == plain.aliases
    assert [note for note in plain.notes if note not in checkpoint.notes] == []
    (note,) = (note for note in checkpoint.notes if note not in plain.notes)
    inner = net.module if isinstance(net, nn.DataParallel) else net
    kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
    assert note == f"a pickled module (class {kind}): tensors read, its code is not run"


def test_temporary_buffers_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    tensors = open_checkpoint(save_zip(Net(), tmp_path / "a.pt")).tensors
    assert "temporary" not in tensors
    assert {"turned", "part", "norm.running_mean", "norm.num_batches_tracked"} <= set(tensors)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_torch_is_read(tmp_path: Path, protocol: int) -> None:
    net = Net()
    torch.save(net, tmp_path / "a.pt", pickle_protocol=protocol)
    assert_equal(open_checkpoint(tmp_path / "a.pt"), net.state_dict())


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("save", SAVES)
def test_a_class_that_is_gone_is_not_missed(
    tmp_path: Path, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ModuleType("gone")
    kind = type("Gone", (Net,), {"__module__": "gone"})
    gone.Gone = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gone", gone)
    net = kind()
    save(net, tmp_path / "a.pt")
    monkeypatch.delitem(sys.modules, "gone")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert_equal(checkpoint, net.state_dict())
    assert "class gone.Gone" in checkpoint.notes[0]
    assert "gone" not in sys.modules


def test_a_module_among_other_things_is_found(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    content = {"epoch": 3, "model": net, "optimizer": optimizer.state_dict(), "best": None}
    checkpoint = open_checkpoint(save_zip(content, tmp_path / "a.pt"))
    assert checkpoint.location == "model"
    assert_equal(checkpoint, net.state_dict())


def test_of_several_modules_a_key_chooses(tmp_path: Path) -> None:
    nets = {"G": nn.Linear(2, 3), "D": nn.Linear(4, 5)}
    path = save_zip({"nets": nets}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"several state dicts: 'nets\.G' .*'nets\.D'"):
        open_checkpoint(path)
    assert_equal(open_checkpoint(path, ReadOptions(key="nets.D")), nets["D"].state_dict())


class Op(nn.Module):
    """Has a function of torch and a class as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.norm = nn.Linear(2, 2), torch.relu, nn.BatchNorm2d


def test_functions_and_classes_of_torch_are_harmless_attributes(tmp_path: Path) -> None:
    net = Op()
    assert_equal(open_checkpoint(save_zip(net, tmp_path / "a.pt")), net.state_dict())


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


class Reduced(nn.Linear):
    """A module that is made by a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (2, 2), self.__dict__


class Subclass(Tensor):
    """A tensor of a class of its own."""


def with_attribute(value: object) -> nn.Module:
    net = nn.Linear(2, 2)
    net.extra = value  # type: ignore[assignment]
    return net


@pytest.mark.parametrize("save", SAVES)
def test_code_in_a_module_is_refused_as_anywhere(tmp_path: Path, save: Any) -> None:
    save(with_attribute(Payload(tmp_path / "marker")), tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: (posix|nt)\.mkdir$"):
        open_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "marker").exists()


def test_what_is_no_module_is_asked_for_as_before(tmp_path: Path) -> None:
    net = with_attribute(argparse.Namespace(lr=0.1))
    path = save_zip(net, tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: argparse\.Namespace$"):
        open_checkpoint(path)
    allowed = open_checkpoint(path, ReadOptions(allow_globals=("argparse.Namespace",)))
    assert_equal(allowed, net.state_dict())


def test_a_module_that_is_made_by_a_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: .*\.Reduced$"):
        open_checkpoint(save_zip(Reduced(2, 2), tmp_path / "a.pt"))


def test_a_class_that_also_makes_what_is_no_module_is_refused(tmp_path: Path) -> None:
    bare = Op.__new__(Op)
    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: .*\.Op$"):
        open_checkpoint(save_zip([Op(), bare], tmp_path / "a.pt"))


def test_a_function_of_torch_that_is_called_is_refused(tmp_path: Path) -> None:
    class Called:
        def __reduce__(self) -> tuple[Any, ...]:
            return nn.functional.relu, (1,)

    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: torch\.nn\.functional\.relu"):
        open_checkpoint(save_zip(with_attribute(Called()), tmp_path / "a.pt"))


def test_a_module_of_a_dangerous_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Net", (nn.Linear,), {"__module__": "code"})
    monkeypatch.setattr("code.Net", kind, raising=False)
    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: code\.Net$"):
        open_checkpoint(save_zip(kind(2, 2), tmp_path / "a.pt"))


def test_a_tensor_of_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("odd", torch.ones(2).as_subclass(Subclass))
    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: .*\.Subclass$"):
        open_checkpoint(save_zip(net, tmp_path / "a.pt"))


def changed(**state: object) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2))
    vars(net).update(state)
    return net


def looped() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].above = net
    return net


def deep(levels: int, times: int = 1) -> nn.Module:
    """Modules in each other, of which each is there so many times."""
    net: nn.Module = nn.Linear(2, 2)
    for _ in range(levels):
        net = nn.Sequential(*[net] * times)
    return net


SENSELESS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "number": (lambda: changed(_parameters={"w": 3}), "'w' is no tensor"),
    "key": (lambda: changed(_parameters={3: torch.ones(2)}), "without an ordinary name"),
    "empty key": (lambda: changed(_parameters={"": torch.ones(2)}), "without an ordinary name"),
    "long key": (lambda: changed(_buffers={"w" * 1001: torch.ones(2)}), "without an ordinary name"),
    "part": (lambda: changed(_modules={"a": torch.ones(2)}), "'a' is no module"),
    "dots": (
        lambda: changed(_parameters={"0.weight": torch.ones(2)}),
        "two tensors are called '0.weight'",
    ),
    "both": (
        lambda: changed(_parameters={"w": torch.ones(2)}, _buffers={"w": torch.ones(2)}),
        "two tensors are called 'w'",
    ),
    "cycle": (looped, r"'0\.above' lies within itself"),
    "deep": (lambda: deep(64), "more than 64 modules within each other"),
    "wide": (lambda: deep(20, 2), "more than 50,000 tensors"),
    "empty and wide": (
        lambda: nn.Sequential(nn.Linear(1, 1), *[nn.Sequential(*[nn.ReLU()] * 800)] * 700),
        "more than 500,000 parameters, buffers and modules",
    ),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_a_tree_that_makes_no_sense_is_refused(tmp_path: Path, name: str) -> None:
    build, reason = SENSELESS[name]
    with pytest.raises(CheckpointError, match=f"torch cannot have written .*{reason}"):
        open_checkpoint(save_zip(build(), tmp_path / "a.pt"))


def test_trees_within_the_limits_are_read(tmp_path: Path) -> None:
    for net in (deep(62), deep(3, 4)):
        assert_equal(open_checkpoint(save_zip(net, tmp_path / "a.pt")), net.state_dict())


@pytest.mark.parametrize("part", ["_parameters", "_buffers", "_modules"])
def test_what_lacks_the_parts_of_a_module_is_none(tmp_path: Path, part: str) -> None:
    path = save_zip(changed(**{part: [torch.ones(2)]}), tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"nobody allowed: .*Sequential"):
        open_checkpoint(path)


def test_parametrised_weights_are_refused_by_their_name(tmp_path: Path) -> None:
    inner = nn.ModuleDict({"weight": nn.Linear(2, 2)})
    net = nn.Sequential(changed(_modules={"parametrizations": inner}))
    with pytest.raises(CheckpointError, match=r"parametrisations \('0\.parametrizations'\)"):
        open_checkpoint(save_zip(net, tmp_path / "a.pt"))


def test_a_module_without_tensors_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors under names"):
        open_checkpoint(save_zip(nn.ReLU(), tmp_path / "a.pt"))
