"""The judge of attacks notices every broken promise, and what a run takes is measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.fuzz.children import WarmProcess, base_cost, run_process
from benchmarks.fuzz.costs import cost_since, forget_peak
from benchmarks.fuzz.promises import (
    CANARY,
    MEMORY,
    SECONDS,
    Cost,
    Ran,
    allowed_cost,
    broken_promises,
)
from tests.attacks.programs import LINEAR, program, write
from tests.attacks.texts import clients

ALLOWED = Cost(SECONDS, MEMORY)
RIGHT = Ran(1, "", "error: a.pt: no such file\nhint: look for it\n", Cost(0.1, 1))


def broken(folder: Path, **changes: object) -> list[str]:
    ran = Ran(**{**vars(RIGHT), **changes})
    return broken_promises(ran, {1, 4}, ALLOWED, folder)


def test_a_clean_refusal_breaks_no_promise(tmp_path: Path) -> None:
    assert broken(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"code": None}, "does not end"),
        ({"code": -11}, "died of SIGSEGV"),
        ({"code": 70}, "exit code 70"),
        ({"code": 0}, "exit code 0"),
        ({"err": "Traceback (most recent call last)\nerror: a\n"}, "a traceback"),
        ({"out": "Traceback (most recent call last)"}, "a traceback"),
        ({"err": "error: a\nerror: b\n"}, "more than one error line"),
        ({"err": "a.py:3: UserWarning: b\nerror: a\n"}, "neither error, hint"),
        ({"err": "error: \x1b[2J\n"}, "control character"),
        ({"out": "\x07"}, "control character"),
        ({"cost": Cost(SECONDS + 1, 0)}, "CPU seconds"),
        ({"cost": Cost(0, MEMORY + 10**6)}, "MB"),
    ],
)
def test_every_broken_promise_is_noticed(
    changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    found = broken(tmp_path, **changes)
    assert len(found) >= 1
    assert says in found[0]


def test_what_ran_is_noticed(tmp_path: Path) -> None:
    (tmp_path / CANARY).mkdir()
    assert broken(tmp_path) == ["something of the file ran"]


def test_a_larger_file_may_take_more_memory(tmp_path: Path) -> None:
    assert allowed_cost(tmp_path).memory == MEMORY
    (tmp_path / "a").write_bytes(b"\0" * 1_000_000)
    assert allowed_cost(tmp_path).memory == MEMORY + 6_000_000
    assert allowed_cost(tmp_path).seconds >= SECONDS


def test_cpu_time_and_memory_are_measured() -> None:
    before = forget_peak()
    block = bytearray(b"\1" * 100_000_000)
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    del block
    cost = cost_since(before)
    assert cost.seconds > 0.2
    assert cost.memory > 90_000_000
    assert cost_since(forget_peak()).memory < 50_000_000  # what was freed counts no more


@pytest.mark.slow
def test_a_warm_process_says_what_a_real_one_says(warm: WarmProcess, tmp_path: Path) -> None:
    write(tmp_path, program([LINEAR], result="h"))
    clients(tmp_path)
    (tmp_path / "empty.pt").touch()
    base = base_cost(tmp_path)
    assert base.memory > 100_000_000  # torch
    merged = "match a.safetensors b.safetensors --dry-run"
    for command in ("inspect a.pt2 empty.pt", "plan a.pt2", merged):
        real = run_process(command.split(), tmp_path, base=base)
        copy = warm.run(command.split(), tmp_path)
        assert (copy.code, copy.out, copy.err) == (real.code, real.out, real.err)
        assert copy.cost.seconds < 10
