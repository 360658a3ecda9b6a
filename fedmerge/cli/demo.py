"""`fedmerge demo`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmerge.cli import show
from fedmerge.cli.terminal import Terminal
from fedmerge.types.words import percent
from fedmerge.workflow.demo import run_demo


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Train, merge and compare, and say how to go on."""
    folder: Path = given["folder"]
    terminal.note("training 4 clients on skewed parts of scikit-learn's digits …")
    with terminal.progress() as progress:
        demo = run_demo(folder, progress=progress)
    rows_found = [vars(row) for row in demo.rows]
    found = {"commands": list(demo.commands), "rows": rows_found, "report": str(demo.report)}
    terminal.result(found)
    for command in demo.commands:
        terminal.line(f"$ {command}")
    rows = [
        [row.model, percent(row.accuracy), show.count(row.parameters), f"{row.growth:.2f}"]
        for row in demo.rows
    ]
    terminal.table("digits", ["model", "accuracy", "parameters", "growth"], rows)
    terminal.line(f"the files are in {folder}; look into one with:")
    terminal.line(f"fedmerge inspect {folder / 'matched.pt'}")
    terminal.line(f"a page about the merge, for a browser: {demo.report}")
