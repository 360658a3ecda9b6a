"""The published schemas are those of the types, and tell right documents from wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import ValidationError

from fedmerge.cli import BY_HAND, COMMANDS, RESULTS, configurable, schemas, text_of
from fedmerge.cli.schemas import main
from tests.schemas import SCHEMAS, check_json


def test_the_published_files_are_what_the_types_give() -> None:
    """`python -m fedmerge.cli.schemas docs/reference/schemas` writes them again."""
    published = {path.stem: path.read_text(encoding="utf-8") for path in SCHEMAS.glob("*.json")}
    assert published == {name: text_of(schema) for name, schema in schemas().items()}


def test_every_command_and_document_has_one() -> None:
    assert list(RESULTS) == [command.name for command in COMMANDS.values()]
    assert schemas().keys() == {
        *("record", "adapter-record", "plan", "class-counts"),
        *(f"json-{name}" for name in RESULTS),
        *(f"config-{command.name}" for command in configurable()),
    }
    assert [command.name for command in configurable()] == ["match", "retrain", "compare", "plan"]


def test_they_are_written_to_a_folder(tmp_path: Any) -> None:
    main(tmp_path / "new")
    written = json.loads((tmp_path / "new" / "json-verify.json").read_text(encoding="utf-8"))
    assert written == schemas()["json-verify"]


CONFIG = {
    "schema": 1,
    "clients": ["a.pt", "b.pt"],
    "max-growth": "none",
    "match_threshold": 0.5,
    "client-weight": {"a": 2},
    "class_counts": {"a": [1, 0.5]},
    "keep": "head.*",
    "model": "net.py:Net",
    "assume-chain": True,
}
PLAN = {"tensors": {"w": ["h", {"prod": [4, "g"]}], "b": {"axes": ["h"], "role": "pointwise"}}}
FAILED = {"kind": "UsageError", "problem": "x", "hint": "", "exit_code": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config-match", CONFIG),
        ("config-match", {}),
        ("plan", PLAN),
        ("class-counts", {"a": [1, 2.5]}),
        ("json-match", {"schema": 1, "error": FAILED}),
    ],
)
def test_right_documents_agree(name: str, value: object) -> None:
    check_json(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config-match", {"seed": "1"}),
        ("config-match", {"schema": 2}),
        *(("config-match", {name: True}) for name in (*BY_HAND, "config", "allow-global")),
        ("config-plan", {"epochs": 3}),
        ("plan", {}),
        ("plan", {"tensors": {"w": [-1]}}),
        ("plan", {"tensors": {"w": [{"sum": []}]}}),
        ("class-counts", {"a": 1}),
        ("json-match", {"error": FAILED}),
        ("json-match", {"schema": 1, "error": FAILED, "more": 1}),
        ("json-verify", {"schema": 1, "ok": True}),
        ("record", {}),
    ],
)
def test_wrong_documents_do_not(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=r"."):
        check_json(name, value)
