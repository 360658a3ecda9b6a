"""What is promised of every command on a stranger's files, and which promises a run broke."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CANARY = "canary"  # what appears in the current folder if anything of a file runs
DEFECT = 70  # exit code of an error that nobody foresaw
REFUSALS = frozenset({1, 2, 3, 4})

SECONDS = 10.0  # of CPU time
SECONDS_PER_READING = 2.0  # besides, for each second that merely reading the files takes
MEMORY = 200_000_000  # bytes
MEMORY_PER_BYTE = 6  # besides, for each byte of the files

_SAID = re.compile(r"(error|hint|note|warning|difference): ")
_ESCAPES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal may obey


@dataclass(frozen=True)
class Cost:
    """What a run took besides what any run takes: CPU seconds, bytes of memory at its peak."""

    seconds: float
    memory: int


@dataclass(frozen=True)
class Ran:
    """What a command returned, printed and cost; `code` is negative if a signal ended it."""

    code: int | None  # None: it did not end
    out: str
    err: str
    cost: Cost


def allowed_cost(folder: Path) -> Cost:
    """Return what a command may cost on the files of a folder."""
    started, size = time.process_time(), 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    size += len(chunk)
    reading = time.process_time() - started
    return Cost(SECONDS + SECONDS_PER_READING * reading, MEMORY + MEMORY_PER_BYTE * size)


def over_budget(cost: Cost, allowed: Cost) -> list[str]:
    """Return which budgets were not kept."""
    broken = []
    if cost.seconds > allowed.seconds:
        broken.append(f"{cost.seconds:.1f} CPU seconds, allowed are {allowed.seconds:.1f}")
    if cost.memory > allowed.memory:
        broken.append(f"{cost.memory / 1e6:.0f} MB, allowed are {allowed.memory / 1e6:.0f}")
    return broken


def broken_promises(
    ran: Ran, codes: Collection[int], allowed: Cost, folder: Path, *, says: Sequence[str] = ()
) -> list[str]:
    """Return every promise that a command broke; `says`: what it must print to stderr or stdout."""
    broken = list(_ends_as_it_should(ran, codes))
    broken += over_budget(ran.cost, allowed)
    broken += [f"it does not say '{phrase}'" for phrase in says if phrase not in ran.err + ran.out]
    if (folder / CANARY).exists():
        broken.append("something of the file ran")
    return broken


def _ends_as_it_should(ran: Ran, codes: Collection[int]) -> Iterator[str]:
    if ran.code is None:
        yield "it does not end"
    elif ran.code < 0:
        yield f"it died of {signal.Signals(-ran.code).name}"
    elif ran.code not in codes:
        yield f"exit code {ran.code}, expected {sorted(codes)}: {ran.err[-500:]}"
    if "Traceback (most recent call last)" in ran.err + ran.out:
        yield f"a traceback: {ran.err[-2000:]}"
    strange = [line for line in ran.err.splitlines() if not _SAID.match(line)]
    if strange and ran.code in codes:
        yield f"lines that are neither error, hint, note, warning nor difference: {strange[:3]}"
    if (
        ran.code in REFUSALS
        and sum(line.startswith("error: ") for line in ran.err.splitlines()) > 1
    ):
        yield "more than one error line"
    if found := _ESCAPES.search(ran.err + ran.out):
        yield f"it prints the control character {found[0]!a}"
