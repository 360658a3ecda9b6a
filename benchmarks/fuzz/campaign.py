"""Read mutant after mutant in this process, and count what became of them."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz.seeds import CANARY, Seed
from fedmerge.errors import Defect, FedmergeError

SECONDS = 10.0  # of CPU time that a file of these sizes may cost
MEMORY = 200_000_000  # bytes, likewise
_DEFECT = 70  # exit code of what nobody foresaw
_PATIENCE = 120  # seconds for a process


@dataclass
class Counts:
    """What became of the mutants of one seed."""

    read: int = 0
    refused: int = 0
    broken: list[str] = field(default_factory=list)  # promises, with the file that broke them

    @property
    def total(self) -> int:
        """How many there were."""
        return self.read + self.refused + len(self.broken)


def fuzz(
    seeds: Sequence[Seed], count: int, *, seed: int, keep: Path, folder: Path
) -> dict[str, Counts]:
    """Read `count` mutants of the seeds in turn; files that break a promise go to `keep`."""
    counts = {own.name: Counts() for own in seeds}
    for number in range(count):
        own = seeds[number % len(seeds)]
        rng = random.Random(f"{seed} {number}")
        with _damaged(own, rng) as path:
            outcome = _outcome(own, path, folder)
            _count(counts[own.name], outcome, own, path, number, keep)
    return counts


def fuzz_processes(
    seeds: Sequence[Seed], count: int, *, seed: int, keep: Path
) -> dict[str, Counts]:
    """Let `fedmerge inspect` read mutants of checkpoints, each as a process of its own."""
    chosen = [own for own in seeds if own.is_checkpoint]
    counts = {own.name: Counts() for own in chosen}
    for number in range(count):
        own = chosen[number % len(chosen)]
        with _damaged(own, random.Random(f"{seed} process {number}")) as path:
            outcome = _process_outcome(path)
            _count(counts[own.name], outcome, own, path, number, keep)
    return counts


@contextlib.contextmanager
def _damaged(own: Seed, rng: random.Random) -> Iterator[Path]:
    """Put a mutant into the place of its seed for a while."""
    path = own.folder / own.file
    right = path.read_bytes()
    damaged = right
    for _ in range(rng.choice((1, 1, 1, 2))):
        damaged = rng.choice(own.mutations)(damaged, rng)
    path.write_bytes(damaged)
    try:
        yield path
    finally:
        path.write_bytes(right)


def _outcome(own: Seed, path: Path, folder: Path) -> str:
    """Return "read", "refused", or which promise was broken."""
    began, memory = time.process_time(), _peak()
    out, err = io.StringIO(), io.StringIO()
    outcome = "read"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            ended = own.read(path)
        code = getattr(ended, "code", 0)
        if code == _DEFECT or "Traceback" in err.getvalue():
            return f"a defect: {err.getvalue()[-300:]}"
        outcome = "read" if code == 0 else "refused"
    except Defect as error:
        return f"a defect: {error.problem}"
    except FedmergeError:
        outcome = "refused"
    except BaseException:
        return f"a traceback: {traceback.format_exc()[-1500:]}"
    if any(place.exists() for place in (folder / CANARY, own.folder / CANARY, Path(CANARY))):
        return "something of the file ran"
    if time.process_time() - began > SECONDS:
        return f"{time.process_time() - began:.1f} CPU seconds"
    if _peak() - memory > MEMORY:
        return f"{(_peak() - memory) / 1e6:.0f} MB"
    return outcome


def _process_outcome(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fedmerge", "inspect", path.name],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if done.returncode not in (0, 1, 3, 4) or "Traceback" in done.stderr:
        return f"exit code {done.returncode}: {done.stderr[-300:]}"
    if (path.parent / CANARY).exists():
        return "something of the file ran"
    return "read" if done.returncode == 0 else "refused"


def _count(counts: Counts, outcome: str, own: Seed, path: Path, number: int, keep: Path) -> None:
    tally = Counter({outcome: 1})
    counts.read += tally["read"]
    counts.refused += tally["refused"]
    if outcome not in ("read", "refused"):
        keep.mkdir(parents=True, exist_ok=True)
        kept = keep / f"{number}-{own.name.replace(' ', '-').replace(',', '')}-{path.name}"
        shutil.copyfile(path, kept)
        counts.broken.append(f"{kept.name}: {outcome}")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
