"""The table of commands: each has a module, known options, and a parser of its own."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from fedmerge.cli import COMMANDS, Command, Option, parameter
from tests.commands import options_of_commands

EACH = pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
MOST = {"match": 32, "retrain": 45}  # options, those of every command too


@EACH
def test_a_module_of_its_name_runs_every_command(command: Command) -> None:
    run = importlib.import_module(f"fedmerge.cli.{command.name}").run
    assert list(inspect.signature(run).parameters) == ["given", "terminal"]


@EACH
def test_every_name_is_given_once(command: Command) -> None:
    options = [name for names in command.options.values() for name in names]
    dials = [name for names in command.dials.values() for name in names]
    names = [*command.arguments, *options, *dials]
    assert sorted(names) == sorted(set(names))
    assert set(command.usual) <= set(options)
    assert command.dials.keys() <= command.options.keys()
    assert bool(dials) == ("set" in options)


@EACH
def test_the_parser_takes_the_options_of_the_table(command: Command) -> None:
    typed = {way for own in command.parameters if not own.is_argument for way in own.typed}
    arguments = set(command.arguments)
    assert options_of_commands()[command.name] == typed | arguments


@pytest.mark.parametrize("name", MOST)
def test_commands_have_no_more_options_than_people_can_read(name: str) -> None:
    parameters = COMMANDS[name].parameters
    assert len([own for own in parameters if not own.is_argument]) <= MOST[name] + 2  # of help


def test_options_are_left_out_by_default_unless_they_are_required() -> None:
    assert parameter(Option("dtype", "As what")).default is None
    assert parameter(Option("force", "Overwrite", kind=bool)).default is False
    assert parameter(Option("where", "To", kind=Path, start=Path("a"))).default == Path("a")
    needed = parameter(Option("model", "Yours", is_required=True))
    assert needed.default is inspect.Parameter.empty


@pytest.mark.parametrize(
    ("command", "text", "spoken"),
    [
        ("match", "`max_growth` 2 and `gamma` 1", "--max-growth 2 and --set gamma 1"),
        ("inspect", "`flatten` is 0", "--flatten is 0"),
        ("match", "`flatten` is 0", "--set flatten is 0"),
        ("match", "say `flatten=12`, `key=a.b`", "say --set flatten=12, --key a.b"),
        ("plan", "use `method=fedma`", "use --method fedma"),
        ("compare", "`merged` names a file", "--global names a file"),
        ("match", "see `fedmerge plan` and `fc1`", "see `fedmerge plan` and `fc1`"),
    ],
)
def test_messages_name_options_as_they_are_typed(command: str, text: str, spoken: str) -> None:
    assert COMMANDS[command].speak(text) == spoken
