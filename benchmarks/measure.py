"""How a benchmark measures: results next to their bars, costs, child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNCACHED = "PYTHONDONTWRITEBYTECODE"  # has every process compile every module anew
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
MEGABYTE = 1e6


@dataclass(frozen=True)
class Result:
    """One measured number, and the most (or least) that it may be."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the bar is met; a number without one always is."""
        if self.bar is None:
            return True
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    @property
    def shown(self) -> str:
        """The number with its unit."""
        return f"{self.value:.4g} {self.unit}".rstrip()

    @property
    def verdict(self) -> str:
        """The bar and whether it is met; empty without one."""
        if self.bar is None:
            return ""
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bar:g}: {'met' if self.is_met else 'MISSED'}"

    def line(self) -> str:
        """Return the number as a line of text."""
        note = f"({self.note})" if self.note else ""
        parts = (f"{self.what:<72}", f"{self.shown:>12}", f"{self.verdict:<14}", note)
        return "  ".join(parts).rstrip()


@dataclass(frozen=True)
class Cost:
    """Wall and CPU seconds, the latter of all threads."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)

    def least(self, other: Cost) -> Cost:
        """Return the lower of each; noise only ever adds."""
        return Cost(min(self.wall, other.wall), min(self.cpu, other.cpu))


def cost_of(work: Callable[[], object], repeats: int = 1) -> Cost:
    """Return the least cost of some runs."""
    return timed(work, repeats)[1]


def timed(work: Callable[[], Any], repeats: int = 1) -> tuple[Any, Cost]:
    """Return what the last run returned, and the least cost of all."""
    least, result = Cost(float("inf"), float("inf")), None
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        least = least.least(Cost(time.perf_counter() - wall, time.process_time() - cpu))
    return result, least


@dataclass(frozen=True)
class ProcessCost:
    """What a whole process took, its own children included."""

    cost: Cost
    peak: int  # bytes of resident memory


def run_python(arguments: Sequence[str], *, threads: int | None = None) -> ProcessCost:
    """Run Python with these arguments and no output; fail if it fails."""
    return run_program([sys.executable, *arguments], threads=threads)


def run_program(command: Sequence[str], *, threads: int | None = None) -> ProcessCost:
    """Run a program without output; fail if it fails.

    A process's peak includes its parent's before `exec`, so a small one stands in between.
    """
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", _WATCH, *command],
        check=True, stdout=subprocess.PIPE, text=True, env=environment(threads),
    )  # fmt: skip
    measured = json.loads(done.stdout)
    unit = 1 if sys.platform == "darwin" else 1024
    return ProcessCost(Cost(measured["wall"], measured["cpu"]), measured["peak"] * unit)


def least_python(
    arguments: Sequence[str], *, repeats: int, threads: int | None = None
) -> ProcessCost:
    """Return the least that some runs of a process took."""
    runs = [run_python(arguments, threads=threads) for _ in range(repeats)]
    cost = runs[0].cost
    for run in runs[1:]:
        cost = cost.least(run.cost)
    return ProcessCost(cost, min(run.peak for run in runs))


def environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a child limited to so many threads; None leaves all cores.

    As in the commands, numpy's products have one thread, and torch's all. Modules are compiled
    once, as where people install them.
    """
    left_out = (*THREAD_VARIABLES, UNCACHED)
    others = {name: value for name, value in os.environ.items() if name not in left_out}
    limits = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    return others | limits | {"OPENBLAS_NUM_THREADS": "1"}


def free_memory() -> float:
    """Return how many bytes can still be taken, or all there are where that isn't told."""
    table = Path("/proc/meminfo")
    if table.exists():
        lines = (line.split() for line in table.read_text(encoding="ascii").splitlines())
        kilobytes = next(int(line[1]) for line in lines if line[0] == "MemAvailable:")
        return 1024.0 * kilobytes
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def in_child(
    function: Callable[..., Mapping[str, Any]], *, threads: int | None, **arguments: Any
) -> Mapping[str, Any]:
    """Call a module's function in a new process, for libraries read their threads at import.

    Arguments and result go through JSON; what the child writes to stderr is shown.
    """
    name = f"{function.__module__}:{function.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", name, json.dumps(arguments)],
        check=True, stdout=subprocess.PIPE, text=True, env=environment(threads),
    )  # fmt: skip
    result: Mapping[str, Any] = json.loads(done.stdout)
    return result


_WATCH = """
import json, os, sys, time
started = time.perf_counter()
with open(os.devnull, "wb") as sink:
    quiet = [(os.POSIX_SPAWN_DUP2, sink.fileno(), 1)]
    child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(child, 0)
wall = time.perf_counter() - started
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps({"wall": wall, "cpu": cpu, "peak": usage.ru_maxrss}))
sys.exit(os.waitstatus_to_exitcode(status))
"""
