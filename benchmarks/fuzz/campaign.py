"""Read mutant after mutant in this process, and count what became of them."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz.children import WarmProcess, base_cost, run_process
from benchmarks.fuzz.costs import cost_since, forget_peak
from benchmarks.fuzz.outcomes import Outcomes
from benchmarks.fuzz.promises import MEMORY, SECONDS, Cost, Ran, broken_promises
from benchmarks.fuzz.seeds import Seed
from fedmerge.errors import FedmergeError

FRESH = 15
READ, REFUSED = "read", "refused"
_CODES = frozenset({0, 1, 2, 3, 4, 5})


@dataclass
class Counts:
    """What became of the mutants of one seed."""

    read: int = 0
    refused: int = 0
    broken: list[str] = field(default_factory=list)  # promises, with the file that broke them

    def count(self, outcome: str) -> None:
        """Count one more."""
        self.read += outcome == READ
        self.refused += outcome == REFUSED
        if outcome not in (READ, REFUSED):
            self.broken.append(outcome)

    @property
    def total(self) -> int:
        """How many there were."""
        return self.read + self.refused + len(self.broken)


def fuzz(
    seeds: Sequence[Seed],
    count: int,
    *,
    seed: int,
    keep: Path,
    folder: Path,
    outcomes: Outcomes | None = None,
) -> dict[str, Counts]:
    """Read `count` mutants of the seeds in turn; files that break a promise go to `keep`."""
    known = outcomes or Outcomes()
    counts = {own.name: Counts() for own in seeds}
    for number in range(count):
        own = seeds[number % len(seeds)]
        name = f"{seed} {own.name} {number}"
        if (outcome := known.get(name)) is None:
            with _damaged(own, random.Random(f"{seed} {number}")) as path:
                outcome = _kept(_outcome(own, path, folder), own, path, number, keep)
            known.add(name, outcome)
        counts[own.name].count(outcome)
    return counts


def fuzz_processes(
    seeds: Sequence[Seed], count: int, *, seed: int, keep: Path, outcomes: Outcomes | None = None
) -> dict[str, Counts]:
    """Let `fedmerge inspect` read mutants of checkpoints, each as a process of its own.

    The first of every `FRESH` starts Python anew; the others are copies of a process that has
    imported torch, and be the whole command from its arguments to its exit code.
    """
    known = outcomes or Outcomes()
    chosen = [own for own in seeds if own.is_checkpoint]
    counts = {own.name: Counts() for own in chosen}
    with tempfile.TemporaryDirectory() as nothing:
        base = base_cost(Path(nothing)) if count else Cost(0, 0)
    with WarmProcess() if count else contextlib.nullcontext() as process:
        for number in range(count):
            own = chosen[number % len(chosen)]
            name = f"{seed} process {own.name} {number}"
            if (outcome := known.get(name)) is None:
                with _damaged(own, random.Random(f"{seed} process {number}")) as path:
                    command, place = ["inspect", path.name], path.parent
                    if number % FRESH == 0 or process is None:
                        ran = run_process(command, place, base=_base_of(path, base))
                    else:
                        ran = process.run(command, place)
                    outcome = _kept(_judged(ran, place), own, path, number, keep)
                known.add(name, outcome)
            counts[own.name].count(outcome)
    return counts


def _base_of(path: Path, base: Cost) -> Cost:
    """Return what a command takes before it reads a file: a graph gets a Python of its own."""
    return Cost(2 * base.seconds, base.memory) if path.suffix == ".pt2" else base


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
    """Return "read", "refused", or which promises were broken."""
    before = forget_peak()
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _strictly():
            code = getattr(own.read(path), "code", 0)
    except FedmergeError as error:
        code = error.exit_code
    except BaseException:
        return f"a traceback: {traceback.format_exc()[-1500:]}"
    ran = Ran(code, out.getvalue(), err.getvalue(), cost_since(before))
    return _judged(ran, folder, own.folder, Path.cwd())


@contextlib.contextmanager
def _strictly() -> Iterator[None]:
    """Let warnings be errors: nobody foresaw them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _judged(ran: Ran, *folders: Path) -> str:
    allowed = Cost(SECONDS, MEMORY)  # the files themselves are small
    broken = [b for folder in folders for b in broken_promises(ran, _CODES, allowed, folder)]
    if broken:
        return "; ".join(dict.fromkeys(broken))
    return REFUSED if ran.code else READ


def _kept(outcome: str, own: Seed, path: Path, number: int, keep: Path) -> str:
    """Return an outcome, with the name of the copy of a file that broke a promise."""
    if outcome in (READ, REFUSED):
        return outcome
    keep.mkdir(parents=True, exist_ok=True)
    kept = keep / f"{number}-{own.name.replace(' ', '-').replace(',', '')}-{path.name}"
    shutil.copyfile(path, kept)
    return f"{kept.name}: {outcome}"
