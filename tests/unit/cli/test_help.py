"""Help: short, with examples on top, and in words."""

from __future__ import annotations

import re

import pytest

from fedmerge.cli import COMMANDS, Command, command_help, program_help

LONGEST, WIDEST = 60, 80
EACH = pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
BOTH = pytest.mark.parametrize("whole", [False, True])
_METAVAR = re.compile(r"<[^>]*>|\bbool\b|\blist\[|\bPath\b")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDEST))
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@EACH
@BOTH
def test_every_help_is_in_words_and_fits(command: Command, whole: bool) -> None:
    lines = command_help(command, whole=whole).splitlines()
    assert max(map(len, lines)) <= WIDEST
    assert [line for line in lines if _METAVAR.search(line)] == []


@EACH
def test_the_short_help_is_short_and_begins_with_two_examples(command: Command) -> None:
    lines = command_help(command, whole=False).splitlines()
    assert len(lines) <= LONGEST
    place = lines.index("Examples:")
    assert place < 6
    assert lines[place + 1 : place + 3] == [f"  {line}" for line in command.examples[:2]]


@EACH
def test_the_whole_help_has_every_option_and_dial(command: Command) -> None:
    shown = command_help(command, whole=True)
    for option in command.parameters:
        typed = option.values if option.is_argument else option.typed[-1]
        assert re.search(rf"^  (-\w, )?{re.escape(typed)}\b", shown, re.M), typed
    for name in command.dial_options:
        assert re.search(rf"^  --set {name}=\S", shown, re.M), name
    short = command_help(command, whole=False)
    options = [own.typed[-1] for own in command.parameters if not own.is_argument]
    hidden = [typed for typed in options if not re.search(rf"{typed}\b", short)]
    assert bool(command.usual) == ("more: fedmerge" in short) == bool(hidden)


def test_the_short_help_of_match_shows_what_people_use() -> None:
    short = command_help(COMMANDS["match"], whole=False)
    assert "--max-growth X|none" in short
    assert "--keep" not in short
    assert short.endswith("more: fedmerge match --help-all")


def test_the_programs_help_names_every_command_in_one_screen() -> None:
    lines = program_help().splitlines()
    assert len(lines) <= LONGEST
    assert max(map(len, lines)) <= WIDEST
    for command in COMMANDS.values():
        assert any(line.startswith(f"  {command.name} ") for line in lines)


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_no_terminal_is_too_narrow(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command_help(COMMANDS["inspect"], whole=True).splitlines()
    longest = max(map(len, (line for line in lines if not line.startswith("  fedmerge"))))
    assert longest <= max(columns, 46)
    assert longest <= 100
