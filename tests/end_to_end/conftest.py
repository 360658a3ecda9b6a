"""Fixtures of the end-to-end tests."""

from pathlib import Path

import pytest

from tests.end_to_end.helpers import Cli, independent, save_all


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line, run in this process."""
    return Cli(capsys)


@pytest.fixture
def nets(tmp_path: Path) -> list[Path]:
    """Three independent LeNets as in/a.pt, in/b.pt, in/c.pt."""
    return save_all(independent("lenet", 3), tmp_path / "in")
