"""The results of a run with the machine they come from, as values and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any, TextIO

from benchmarks.measure import Result
from benchmarks.suites import SUITES

PACKAGES = ("fedmerge", "torch", "numpy", "scipy", "lapx")


@dataclass(frozen=True)
class Report:
    """The results of some suites, and where and when they were measured."""

    machine: Mapping[str, str]
    dates: tuple[str, ...]  # ISO, UTC
    suites: Mapping[str, Sequence[Result]]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, every result with its verdict."""
        suites = {
            name: [{**asdict(result), "met": result.is_met} for result in results]
            for name, results in self.suites.items()
        }
        return {"machine": dict(self.machine), "dates": list(self.dates), "suites": suites}


def read_report(values: Mapping[str, Any]) -> Report:
    """Return a report from what `to_json` made."""
    suites = {
        name: [Result(**{k: v for k, v in result.items() if k != "met"}) for result in results]
        for name, results in values["suites"].items()
    }
    return Report(values["machine"], tuple(values["dates"]), suites)


def merged(kept: Report, fresh: Report) -> Report:
    """Return the suites of both, the fresh ones where they are in both, in the usual order."""
    if kept.machine != fresh.machine:
        raise SystemExit(f"other machine or versions: {kept.machine} and {fresh.machine}")
    suites = {**kept.suites, **fresh.suites}
    dates = tuple(sorted({*kept.dates, *fresh.dates}))
    return Report(kept.machine, dates, {name: suites[name] for name in SUITES if name in suites})


def measured(names: Iterable[str], *, shown: TextIO) -> Report:
    """Run the suites of these names, every result shown as soon as it is known."""
    suites: dict[str, list[Result]] = {}
    for name in names:
        print(f"{SUITES[name].title} ({name})", file=shown, flush=True)
        suites[name] = []
        for result in SUITES[name].results():
            suites[name].append(result)
            print(f"  {result.line()}", file=shown, flush=True)
    today = datetime.now(timezone.utc).date().isoformat()
    return Report(machine(), (today,), suites)


def machine() -> dict[str, str]:
    """Return what a reader must know of the machine, and nothing that names it."""
    versions = {package: version(package) for package in PACKAGES}
    return {
        "cores": str(os.cpu_count()),
        "processor": platform.machine(),
        "system": platform.system(),
        "Python": platform.python_version(),
        **versions,
    }
