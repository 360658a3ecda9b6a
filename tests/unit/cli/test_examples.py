"""Help that a user can copy."""

from __future__ import annotations

import re

import pytest
import typer

from fedmerge.cli import COMMANDS, INTRODUCTION, app
from tests.commands import options_of_commands, unknown_in_line

WIDEST = 78  # of 80 columns, help keeps one free at either side
FEW = 3  # commands that matter at first


@pytest.mark.parametrize("command", sorted(set(options_of_commands()) - {""}))
def test_every_command_has_examples_of_itself_that_its_parser_takes(command: str) -> None:
    parser = getattr(typer.main.get_command(app), "commands")[command]  # noqa: B009
    for line in COMMANDS[command].examples:
        program, name, *arguments = line.split()
        assert (program, name) == ("fedmerge", command)
        with parser.make_context(name, arguments, resilient_parsing=True) as context:
            assert not context.args
        assert unknown_in_line(line) == []


def test_no_example_is_broken_by_an_ordinary_terminal() -> None:
    """A line that help breaks in two runs as something else when it is copied."""
    broken = [line for own in COMMANDS.values() for line in own.examples if len(line) > WIDEST]
    assert broken == []


def test_the_introduction_is_of_few_commands_that_exist() -> None:
    lines = re.findall(r"^ {4}(fedmerge .*)$", INTRODUCTION, re.M)
    assert len({line.split()[1] for line in lines}) == FEW
    assert [wrong for line in lines for wrong in unknown_in_line(line)] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("fedmerge mach a.pt", ["fedmerge mach"]),
        ("fedmerge match a.pt --data x.npz -o g.pt", ["match --data"]),
        ("fedmerge match a.pt -x", ["match -x"]),
        ("fedmerge match a.pt -o g.pt  # --not an option", []),
        ("fedmerge --version", []),
    ],
)
def test_a_line_that_would_be_refused_is_noticed(line: str, wrong: list[str]) -> None:
    assert unknown_in_line(line) == wrong


def test_every_command_stands_under_a_heading() -> None:
    panels = {command.panel for command in COMMANDS.values()}
    assert all(panels)
    assert len(panels) > 1
