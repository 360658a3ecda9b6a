from __future__ import annotations

import importlib
import inspect

import pytest

from fedmerge.cli.commands import COMMANDS, Command
from fedmerge.cli.parameters import REQUIRED, flag, option, signature_of


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_module_of_its_name_runs_every_command(command: Command) -> None:
    run = importlib.import_module(f"fedmerge.cli.{command.name}").run
    assert list(inspect.signature(run).parameters) == ["given", "terminal"]


def test_a_parameter_named_twice_is_refused() -> None:
    force = flag("force", "Output", "Overwrite.")
    assert list(signature_of([force]).parameters) == ["force"]
    with pytest.raises(ValueError, match="duplicate parameter name: 'force'"):
        signature_of([force, force])


def test_options_are_left_out_by_default_unless_they_are_required() -> None:
    plain = option("dtype", str | None, "Output", "As what.")
    assert plain.default is None
    assert plain.replace(default=REQUIRED).default is inspect.Parameter.empty
    assert flag("force", "Output", "Overwrite.").default is False
