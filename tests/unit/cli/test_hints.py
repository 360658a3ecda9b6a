"""Whatever a message tells the user to type exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedmerge
from fedmerge.cli import COMMANDS
from tests.commands import options_of_commands, unknown_in

PACKAGE = Path(fedmerge.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
LIBRARY = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] != "cli"]
LEAST_HINTS = 150  # there are more: a walk that finds none must not pass
_OPTION = re.compile(r"(?<![\w(-])--[a-z][a-z-]+")
_ARGUMENT = re.compile(r"`[a-z][a-z0-9_]*(?:=[^`]*)?`")
OF_FLOWER = "--node-config"  # how its nodes are told who they are
# Records hold these, and what records hold stays as it is; model cards show a command; a hint
# names an option of Flower's.
RECORDED = {
    ("chains.py", "--model"),
    ("model_card.py", "--config"),
    ("model_card.py", "--base"),
    ("flower_engine.py", OF_FLOWER),
}


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
    assert [(path.name, wrong) for path, hint in hints for wrong in unknown_words(hint)] == []


def unknown_words(hint: str) -> list[str]:
    """Return what a hint names that can't be typed, nor given in Python."""
    known = {name for command in COMMANDS.values() for name in command.names}
    named = [word for word in _ARGUMENT.findall(hint) if re.search("[_=]", word)]
    wrong = [word for word in named if word.strip("`").partition("=")[0] not in known]
    return [*unknown_in(hint.replace(OF_FLOWER, "")), *wrong]


def options_in(tree: ast.Module) -> Iterator[str]:
    """Yield options of the command line that texts name, but for docstrings and commands."""
    said = {id(inner) for node in ast.walk(tree) for inner in _docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield from _OPTION.findall(re.sub("`[^`]*`", "", node.value))


def _docstring(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the docstring of a module, class or function."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield from (inner.value for inner in node.body[:1] if isinstance(inner, ast.Expr))


def test_the_library_names_arguments_and_the_command_line_options() -> None:
    found = {(path.name, o) for path in LIBRARY for o in options_in(ast.parse(path.read_text()))}
    assert found == RECORDED


def test_an_option_in_a_text_of_the_library_is_noticed() -> None:
    source = '"""A --docstring."""\ndef f(x):\n    "--own"\n    return f"{x}: --gamma `m --key`"'
    assert list(options_in(ast.parse(source))) == ["--gamma"]


@pytest.mark.parametrize(
    ("hint", "wrong"),
    [
        ("try --max-grow 2", ["--max-grow"]),
        ("look with `fedmerge look`", ["fedmerge look"]),
        ("look with `fedmerge inspect --shards`", ["inspect --shards"]),
        ("look with `fedmerge inspect --key a.b`, or say --keep", []),
        ("give `max_grow=2`, or `gamma`", ["`max_grow=2`"]),
    ],
)
def test_a_hint_that_names_what_does_not_exist_is_noticed(hint: str, wrong: list[str]) -> None:
    assert unknown_words(hint) == wrong


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
