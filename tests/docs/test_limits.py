"""The page of limits says the numbers that the code has, and every exit code."""

import importlib
import re
from pathlib import Path

import pytest

from fedmerge import errors

PAGE = (Path(__file__).parents[2] / "docs/reference/limits.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .+ \| ([0-9,]+) \| `([\w.]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("number", "place"), ROWS, ids=lambda value: value)
def test_a_limit_is_the_one_in_the_code(number: str, place: str) -> None:
    module, _, name = place.rpartition(".")
    assert getattr(importlib.import_module(f"fedmerge.{module}"), name) == int(
        number.replace(",", "")
    )


def test_every_row_is_checked_and_every_exit_code_listed() -> None:
    limits = PAGE.split("## Exit codes")[0]
    assert len(ROWS) == limits.count("\n| ") - 1 > 20
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert raised <= codes
    assert {0, 5, 130} <= codes
