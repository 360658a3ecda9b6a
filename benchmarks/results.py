"""Files of results: a list of runs as JSON, added to run by run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_runs(path: Path) -> list[Any]:
    """Return the runs of a results file, none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_runs(path: Path, runs: Iterable[Any]) -> None:
    """Replace a results file; one that is interrupted leaves the old one."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(json.dumps(list(runs), indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)
