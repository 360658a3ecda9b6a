"""Commands in processes of their own, measured: real ones, or copies of a warm one."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fuzz.promises import Cost, Ran

PATIENCE = 120  # seconds until a process counts as one that does not end
MOST_SECONDS = 60  # of CPU time, after which the system ends it
MOST_MEMORY = 8 << 30  # bytes of address space: torch alone takes some
_PRELOADED = (
    *("fedmerge.cli.app", "fedmerge.cli.boundary", "fedmerge.cli.inspect", "fedmerge.cli.plan"),
    *("fedmerge.workflow.models", "fedmerge.cli.match", "fedmerge.cli.verify"),
)


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
            preexec_fn=_limit,
        )
        patience = threading.Timer(PATIENCE, process.kill)
        patience.start()
        _, status, used = os.wait4(process.pid, 0)
        is_late = not patience.is_alive()
        patience.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        printed, said = _text(out), _text(err)
    took = _cost(used)
    cost = Cost(max(0.0, took.seconds - base.seconds), max(0, took.memory - base.memory))
    return Ran(None if is_late else process.returncode, printed, said, cost)


def base_cost(folder: Path) -> Cost:
    """Return what a command costs that refuses its file at once: Python, torch, our modules."""
    (folder / "empty.pt").touch()
    return run_process(["inspect", "empty.pt"], folder, base=Cost(0, 0)).cost


def run_warm(arguments: Sequence[str], folder: Path) -> Ran:
    """Run a command in a copy of a process that has imported torch and fedmerge already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as texts:
        process = context.Process(
            target=_work, args=(list(arguments), str(folder), texts, theirs), daemon=True
        )
        process.start()
        theirs.close()
        process.join(PATIENCE)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        cost = Cost(0, 0)
        if code is not None and code >= 0 and ours.poll():
            cost = ours.recv()
        said = [Path(texts, name) for name in ("out", "err")]
        out, err = (
            path.read_bytes().decode(errors="replace") if path.exists() else "" for path in said
        )
    return Ran(code, out, err, cost)


def _work(arguments: list[str], folder: str, texts: str, result: Any) -> None:
    """Be the command, and tell what it took."""
    os.chdir(folder)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(texts) / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdin, sys.argv = Path(os.devnull).open(), ["fedmerge", *arguments]  # noqa: SIM115 (to the end)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
    _limit()
    before = resource.getrusage(resource.RUSAGE_SELF)
    from fedmerge.cli import main

    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        after, start = _cost(resource.getrusage(resource.RUSAGE_SELF)), _cost(before)
        result.send(Cost(after.seconds - start.seconds, after.memory - start.memory))


def _limit() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + MOST_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _cost(used: resource.struct_rusage) -> Cost:
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode(errors="replace"))
