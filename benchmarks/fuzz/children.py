"""Commands in processes of their own, measured: real ones, or copies of a warm one."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fuzz.promises import Cost, Ran

PATIENCE = 300  # seconds until a process counts as one that does not end
MOST_SECONDS = 60  # of CPU time, after which the system ends it
MOST_MEMORY = 8 << 30  # bytes of address space: torch alone takes some


def run_process(arguments: Sequence[str], folder: Path, *, base: Cost) -> Ran:
    """Run a command as a user does, and return what it took besides `base`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedmerge", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            preexec_fn=limit,
        )
        patience = threading.Timer(PATIENCE, process.kill)
        patience.start()
        _, status, used = os.wait4(process.pid, 0)
        is_late = not patience.is_alive()
        patience.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        printed, said = _text(out), _text(err)
    took = cost_of(used)
    cost = Cost(max(0.0, took.seconds - base.seconds), max(0, took.memory - base.memory))
    return Ran(None if is_late else process.returncode, printed, said, cost)


def base_cost(folder: Path) -> Cost:
    """Return what a command costs that refuses its file at once: Python, torch, our modules."""
    (folder / "empty.pt").touch()
    return run_process(["inspect", "empty.pt"], folder, base=Cost(0, 0)).cost


class WarmProcess:
    """A process that has imported torch and fedmerge already, and copies itself for commands."""

    def __enter__(self) -> WarmProcess:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzz.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end, as its input does."""
        self._process.communicate()

    def run(self, arguments: Sequence[str], folder: Path) -> Ran:
        """Run a command in a copy of the process, and return what the copy took for it."""
        asks, answers = self._process.stdin, self._process.stdout
        assert asks is not None
        assert answers is not None
        with tempfile.TemporaryDirectory() as name:
            texts = Path(name)
            asks.write(json.dumps([list(arguments), str(folder), name]) + "\n")
            asks.flush()
            code = int(answers.readline())
            out, err = (_printed(texts / stream) for stream in ("out", "err"))
            told = texts / "cost"
            cost = Cost(**json.loads(told.read_text())) if told.exists() else Cost(0, 0)
        return Ran(None if code == -signal.SIGALRM else code, out, err, cost)


def _printed(path: Path) -> str:
    return path.read_bytes().decode(errors="replace") if path.exists() else ""


def limit() -> None:
    """Let the system end this process if it takes far too much."""
    os.environ["OMP_NUM_THREADS"] = "1"
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + MOST_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def cost_of(used: resource.struct_rusage) -> Cost:
    """Return what the system says that a process took."""
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode(errors="replace"))
