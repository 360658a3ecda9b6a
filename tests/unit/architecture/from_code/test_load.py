"""Models from the user's own files and packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from fedmerge.architecture.from_code import load_factory
from fedmerge.errors import ArchitectureError

CODE = """
from torch import nn
from parts import width

class Net(nn.Module):
    def __init__(self, inputs=4):
        super().__init__()
        self.fc = nn.Linear(inputs, width)

def build(inputs=4):
    return Net(inputs)

short = lambda: Net()
ready = Net(2)
wrong = lambda: 3
number = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "parts.py").write_text("width = 6\n")
    (tmp_path / "net.py").write_text(CODE)
    return str(tmp_path / "net.py")


@pytest.mark.parametrize(("name", "inputs"), [("Net", 4), ("build", 4), ("short", 4), ("ready", 2)])
def test_classes_functions_lambdas_and_modules_load(file: str, name: str, inputs: int) -> None:
    path = list(sys.path)
    model = load_factory(f"{file}:{name}", {})
    assert tuple(model.get_parameter("fc.weight").shape) == (6, inputs)
    assert sys.path == path


def test_arguments_reach_the_factory(file: str) -> None:
    model = load_factory(f"{file}:build", {"inputs": 9})
    assert model.get_parameter("fc.weight").shape[1] == 9


def test_a_module_on_the_path_loads() -> None:
    assert isinstance(load_factory("torch.nn:Identity", {}), nn.Identity)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (":nothing", "there is no callable 'nothing'; it defines Net, build"),
        (":number", "there is no callable 'number'"),
        (":wrong", r"wrong\(\) returns int, no nn.Module"),
        ("", "names no model"),
    ],
)
def test_what_is_no_model_is_refused(file: str, name: str, problem: str) -> None:
    with pytest.raises(ArchitectureError, match=problem):
        load_factory(f"{Path(file).name}{name}" if not name else f"{file}{name}", {})


def test_a_factory_that_fails_says_how_to_pass_arguments(file: str) -> None:
    with pytest.raises(ArchitectureError, match=r"build\(depth=2\) fails: TypeError") as caught:
        load_factory(f"{file}:build", {"depth": 2})
    assert "`model_arg=key=value`" in caught.value.hint


def test_missing_and_broken_code_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="no such file"):
        load_factory(f"{tmp_path}/none.py:build", {})
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ArchitectureError, match="cannot be loaded: ModuleNotFoundError"):
        load_factory(f"{tmp_path}/broken.py:build", {})
    with pytest.raises(ArchitectureError, match="cannot be imported"):
        load_factory("nothing_of_this_name:build", {})
