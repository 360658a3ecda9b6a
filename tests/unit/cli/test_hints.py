"""Whatever a message tells the user to type exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedmerge
from tests.commands import options_of_commands, unknown_in

SOURCES = sorted(Path(fedmerge.__file__).parent.rglob("*.py"))
LEAST_HINTS = 150  # there are more: a walk that finds none must not pass


def hints_in(tree: ast.Module) -> Iterator[str]:
    """Yield the second arguments of the errors that a module raises, names looked up in it."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not _name(node.func).endswith("Error"):
            continue
        given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "hint")]
        for hint in given:
            found = constants.get(hint.id, hint) if isinstance(hint, ast.Name) else hint
            yield "".join(_words(found))


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _words(hint: ast.expr) -> Iterator[str]:
    """Yield the constant parts of a text, with something in place of what is filled in."""
    parts = hint.values if isinstance(hint, ast.JoinedStr) else [hint]
    for part in parts:
        if isinstance(part, ast.Constant):
            yield str(part.value)
        elif isinstance(part, ast.FormattedValue):
            yield "…"
        else:
            inner = (n.value for n in ast.walk(part) if isinstance(n, ast.Constant))
            yield " ".join(map(str, inner))


def test_every_hint_names_options_and_commands_that_exist() -> None:
    hints = [(path, hint) for path in SOURCES for hint in hints_in(ast.parse(path.read_text()))]
    assert len([hint for _, hint in hints if hint]) > LEAST_HINTS
    assert [(path.name, wrong) for path, hint in hints for wrong in unknown_in(hint)] == []


@pytest.mark.parametrize(
    ("hint", "wrong"),
    [
        ("try --max-grow 2", ["--max-grow"]),
        ("look with `fedmerge look`", ["fedmerge look"]),
        ("look with `fedmerge inspect --shards`", ["inspect --shards"]),
        ("look with `fedmerge inspect --key a.b`, or say --keep", []),
    ],
)
def test_a_hint_that_names_what_does_not_exist_is_noticed(hint: str, wrong: list[str]) -> None:
    assert unknown_in(hint) == wrong


def test_hints_are_found_in_every_way_they_are_written() -> None:
    source = """
HINT = "constant"
raise UsageError("a", "plain")
raise errors.MatchingError("a", f"filled {in_} here")
raise UsageError("a", hint=HINT)
raise UsageError("a", "this" if x else "that")
raise UsageError("a")
"""
    found = list(hints_in(ast.parse(source)))
    assert found == ["plain", "filled … here", "constant", "this that"]


def test_there_are_commands_to_check_against() -> None:
    assert {"", "match", "compare", "report"} < set(options_of_commands())
