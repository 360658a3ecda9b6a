"""No file of a stranger runs anything, ends in a traceback, or costs more than it may."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.fuzz.children import run_warm
from benchmarks.fuzz.promises import allowed_cost, broken_promises
from tests.attacks import legacy_files, pickles, safetensors, scripts, zips
from tests.attacks.attack import ATTACKS

KINDS = (legacy_files, pickles, safetensors, scripts, zips)


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_breaks_a_promise(name: str, tmp_path: Path) -> None:
    command = shlex.split(ATTACKS[name].build(tmp_path))
    allowed = allowed_cost(tmp_path)
    ran = run_warm(command, tmp_path)
    assert broken_promises(ran, ATTACKS[name].codes, allowed, tmp_path) == []
