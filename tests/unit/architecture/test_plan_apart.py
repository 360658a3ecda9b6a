"""A graph is planned in a process that the system stops, whatever the graph's own budget says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedmerge.architecture import plan_apart
from tests.attacks.programs import LINEAR, named, node, program, sizes, write

pytestmark = [
    pytest.mark.planned_apart,
    pytest.mark.skipif(sys.platform != "linux", reason="other limits there"),
]

NO_BUDGET = """
from fedmerge.architecture.from_code import program_budget as own
own.MOST_HELD = own.MOST_MADE = own.MOST_SECONDS = 1 << 40
"""
MORE_MEMORY = """
from fedmerge.architecture import plan_apart as limits
limits.MOST_MEMORY = 1 << 40
"""


def planned(folder: Path, length: int) -> dict[str, Any]:
    """Return the answer about a graph that makes so many numbers."""
    many = [node("new_zeros.default", named("h"), sizes(length), out="z")]
    some = [node("sum.default", named("z"), out="s")]
    last = [node("add.Tensor", named("h"), named("s"), out="out")]
    write(folder, program([LINEAR, *many, *some, *last]))
    place = {"path": str(folder / "a.pt2"), "name": "a.pt2"}
    return plan_apart.planned_apart({**place, "reading": {}, "seed": 0})


@pytest.mark.slow
def test_a_graph_gets_no_more_memory_than_a_file_may_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = NO_BUDGET + plan_apart._MAIN
    monkeypatch.setattr(plan_apart, "_MAIN", main)
    refused = planned(tmp_path, 75_000_000)["error"]
    assert "can't allocate memory: you tried to allocate 300000000 bytes" in refused["problem"]
    monkeypatch.setattr(plan_apart, "_MAIN", MORE_MEMORY + main)  # negative control
    assert "plan" in planned(tmp_path, 75_000_000)
