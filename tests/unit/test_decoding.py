"""Texts of strangers: whatever is wrong with one is an error of the caller's choice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedmerge.decoding import (
    DEEPEST,
    LARGEST_YAML,
    MOST_NUMBERS,
    MOST_PARTS,
    decode_json,
    decode_value,
    decode_yaml,
    read_text,
)
from fedmerge.errors import CheckpointError, UsageError


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "truncated"),
        ('{"a": ', "truncated"),
        ("[NaN]", "malformed"),
        ("[1e400]", "out of range"),
        ("[" + "9" * 5000 + "]", "out of range"),
        ('["\\ud800"]', "truncated|surrogate"),
        (nested(DEEPEST + 1), "levels deep"),
        (nested(100_000), "levels deep"),
        ("[" * 100_000, "levels deep"),
        ("[" + "[]," * MOST_PARTS + "[]]", "more than .* lists"),
        ("[" + "1," * (MOST_NUMBERS + 2) + "1]", "more than .* numbers"),
    ],
    ids=lambda value: value[:12],
)
def test_wrong_json_is_the_callers_error(text: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        decode_json(text, Any, fail=CheckpointError)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "did not find expected"),
        ("[" * 3000, "levels deep"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: 2001-13-45", "month"),
        ("? [a]\n: 1", "unhashable"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("\0", "control characters"),
        (" " * (LARGEST_YAML + 1), "characters"),
    ],
    ids=lambda value: value[:12],
)
def test_wrong_yaml_is_the_callers_error(text: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        decode_yaml(text, Any, fail=CheckpointError)


def test_what_is_right_is_decoded() -> None:
    assert decode_json(nested(DEEPEST), Any, fail=CheckpointError)
    assert decode_json(b'{"a": [1, 2.5]}', dict[str, list[float]], fail=CheckpointError) == {
        "a": [1.0, 2.5]
    }
    assert decode_yaml("a: [1, 2]", dict[str, list[int]], fail=CheckpointError) == {"a": [1, 2]}
    assert decode_value({"a": 1}, dict[str, int], fail=CheckpointError) == {"a": 1}


def test_a_value_of_another_type_is_refused_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"Expected `int`, got `str` - at `\$\[...\]`"):
        decode_value({"a": "1"}, dict[str, int], fail=CheckpointError)


@dataclass(frozen=True)
class Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise UsageError("an odd number")


def test_a_types_own_rule_is_the_callers_error() -> None:
    assert decode_value({"number": 2}, Even, fail=CheckpointError) == Even(2)
    with pytest.raises(CheckpointError, match="an odd number"):
        decode_value({"number": 1}, Even, fail=CheckpointError)


def test_a_text_that_cannot_be_read_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_text(tmp_path / "absent.json", fail=CheckpointError)
    with pytest.raises(CheckpointError, match="null"):
        read_text(tmp_path / "a\0b", fail=CheckpointError)
    (tmp_path / "a.json").write_bytes(b"{}")
    assert read_text(tmp_path / "a.json", fail=CheckpointError) == b"{}"
