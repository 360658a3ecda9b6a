"""How a benchmark measures, and how it shows a number next to its bar."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One measured number, and the most (or least) that it may be."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the bar is met; a number without one always is."""
        if self.bar is None:
            return True
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def line(self) -> str:
        """Return the number as a line of text."""
        text = f"{self.what:<78} {self.value:>9.2f} {self.unit:<8}"
        if self.bar is None:
            return text.rstrip()
        sign = "≥" if self.at_least else "≤"
        return f"{text} bar {sign} {self.bar:g} {'met' if self.is_met else 'MISSED'}"


def best_of(times: int, work: Callable[[], object]) -> float:
    """Return the shortest wall time in seconds of some runs; noise only ever adds."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def run_process(arguments: Sequence[str]) -> None:
    """Run Python with these arguments and no output; fail if it fails."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def peak_memory(arguments: Sequence[str]) -> int:
    """Return the peak resident memory in bytes of a Python process.

    A process's peak includes its parent's before `exec`, so a small one stands in between.
    """
    done = subprocess.run(
        [sys.executable, "-c", _WATCH, sys.executable, *arguments],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


_WATCH = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
