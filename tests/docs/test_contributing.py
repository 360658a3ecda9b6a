"""CONTRIBUTING names files and tables that are there."""

from __future__ import annotations

import re

import pytest

from tests.pages import DOCS

ROOT = DOCS.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "fedmerge"
FILES = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", TEXT)))
# "`TABLE` … `file.py`": a name in capitals, and the next file that is named.
TABLES = re.findall(r"`(_?[A-Z][A-Z_]+)`(?:(?!`_?[A-Z][A-Z_]+`).)*?`([a-z_/]+\.py)`", TEXT, re.S)


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_it_names_is_there(name: str) -> None:
    assert (PACKAGE / name).exists() or (ROOT / name).exists()


@pytest.mark.parametrize(("table", "file"), TABLES)
def test_every_table_is_in_its_file(table: str, file: str) -> None:
    if (PACKAGE / file).exists():
        assert re.search(rf"^{table}\b", (PACKAGE / file).read_text(encoding="utf-8"), re.M)


def test_the_map_has_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= {name.strip("/") for name in FILES}
    assert len(FILES) > 20
    assert len(TABLES) > 5
