"""Models by their names in a library; the libraries here are small stand-ins of theirs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fedmerge
from fedmerge import ArchitectureError
from fedmerge.architecture.from_library import library_model

STAND_INS = {
    "torchvision/__init__.py": "",
    "torchvision/models.py": """
from torch import nn

def list_models():
    return ["tinynet"]

def get_model(name, weights="DEFAULT", **settings):
    assert name == "tinynet" and weights is None, "nothing is fetched"
    return TinyNet(**settings)

class TinyNet(nn.Sequential):
    def __init__(self, num_classes=4):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, num_classes))
""",
    "timm/__init__.py": """
from torchvision.models import TinyNet

def is_model(name):
    return name == "tinynet"

def create_model(name, pretrained=True, **settings):
    assert is_model(name) and not pretrained, "nothing is fetched"
    return TinyNet(**settings)
""",
}


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put small packages of the libraries' names first on the path, for one test."""
    for name, code in STAND_INS.items():
        place = tmp_path / "packages" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in ("torchvision", "timm"):
            del sys.modules[name]


def _shuffled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same two layers with their hidden units the other way round."""
    return {
        "0.weight": state["0.weight"].flip(0),
        "0.bias": state["0.bias"].flip(0),
        "2.weight": state["2.weight"].flip(1),
        "2.bias": state["2.bias"],
    }


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_library_builds_what_it_knows_by_name(library: str) -> None:
    model = library_model(f"{library}:tinynet", {"num_classes": 3})
    assert model is not None
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert state["2.weight"].shape == (3, 8)
    code = fedmerge.ModelCode(f"{library}:tinynet", {"num_classes": 3})
    merge = fedmerge.match([state, _shuffled(state)], model=code, probe="none", max_growth=1)
    merged = merge.state_dict()
    assert all(torch.allclose(merged[name], state[name], atol=1e-6) for name in state)
    assert merge.plan.architecture == "TinyNet"


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_other_names_are_attributes_of_the_module(library: str) -> None:
    assert library_model(f"{library}:create_something", {}) is None
    with pytest.raises(ArchitectureError, match="there is no callable 'create_something'"):
        fedmerge.ModelCode(f"{library}:create_something").build()


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_what_a_library_refuses_is_said(library: str) -> None:
    with pytest.raises(ArchitectureError, match=f"{library} can't build 'tinynet'.*depth"):
        library_model(f"{library}:tinynet", {"depth": 2})


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ArchitectureError, match="timm can't be imported") as caught:
        library_model("timm:tinynet", {})
    assert caught.value.hint == "pip install timm"


def test_a_timm_folder_brings_its_code_and_its_input_size(tmp_path: Path) -> None:
    model = library_model("timm:tinynet", {"num_classes": 3})
    assert model is not None
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = {"architecture": "tinynet", "num_classes": 3, "pretrained_cfg": {"input_size": [6]}}
    for name, own in (("one", state), ("other", _shuffled(state))):
        (tmp_path / name).mkdir()
        torch.save(own, tmp_path / name / "pytorch_model.bin")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    merge = fedmerge.match(
        [tmp_path / "one", tmp_path / "other"], output=tmp_path / "merged", probe="none"
    )
    assert merge.plan.architecture == "TinyNet"
    assert merge.growth == 1  # its config.json has no field for the width
    assert all(group.why == "no field of config.json says its width" for group in merge.plan.groups)
    assert json.loads((tmp_path / "merged/config.json").read_text()) == config
    assert "library_name: timm" in (tmp_path / "merged/README.md").read_text()
