"""What attacks share: a process that has imported torch and fedmerge already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fuzz.children import WarmProcess


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    with WarmProcess() as process:
        yield process
