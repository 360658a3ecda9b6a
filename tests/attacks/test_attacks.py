"""No file of a stranger runs anything, ends in a traceback, or costs more than it may."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from benchmarks.fuzz.children import WarmProcess
from benchmarks.fuzz.promises import allowed_cost, broken_promises
from tests.attacks import (
    data_files,
    further,
    legacy_files,
    modules,
    pickles,
    places,
    programs,
    safetensors,
    scripts,
    texts,
    zips,
)
from tests.attacks.attack import ATTACKS

KINDS = (
    data_files,
    further,
    legacy_files,
    modules,
    pickles,
    places,
    programs,
    safetensors,
    scripts,
    texts,
    zips,
)

BUSY = 2  # CPU seconds of cores that other work shares count half; `make fuzz` is strict
# What does the most work that is allowed at all: smaller ones of the same kinds are quick.
AT_LIMITS = {
    "as_many_tensors_as_are_allowed",
    "as_many_tensors_as_are_allowed_in_modules",
    "fifty_thousand_tensors",
}


def _case(name: str) -> ParameterSet:
    return pytest.param(name, marks=[pytest.mark.slow] if name in AT_LIMITS else [])


@pytest.mark.parametrize("name", [_case(name) for name in ATTACKS])
def test_no_attack_breaks_a_promise(name: str, warm: WarmProcess, tmp_path: Path) -> None:
    command = shlex.split(ATTACKS[name].build(tmp_path))
    promised = allowed_cost(tmp_path)
    allowed = replace(promised, seconds=BUSY * promised.seconds)
    ran = warm.run(command, tmp_path)
    assert broken_promises(ran, ATTACKS[name].codes, allowed, tmp_path) == []
