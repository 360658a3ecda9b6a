"""What packages export is what their modules define, whichever is imported first."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import fedmerge

ROOT = Path(fedmerge.__file__).parent
STUBS = sorted(ROOT.rglob("__init__.pyi"))


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.name)
def test_a_package_exports_what_its_stub_lists(stub: Path) -> None:
    package = ".".join(["fedmerge", *stub.parent.relative_to(ROOT).parts])
    exports = import_module(package)
    homes = [
        node
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
    ]
    assert homes
    for node in homes:
        home = import_module(f"{package}.{node.module}")
        for alias in node.names:
            assert getattr(exports, alias.name) is getattr(home, alias.name), alias.name


def test_there_is_a_stub_for_every_package_that_loads_lazily() -> None:
    lazy = [path for path in ROOT.rglob("__init__.py") if "lazy_loader" in path.read_text("utf-8")]
    assert sorted(path.with_suffix(".pyi") for path in lazy) == STUBS
