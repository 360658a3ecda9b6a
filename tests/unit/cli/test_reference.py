"""The reference has the options that there are, as the commands describe them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedmerge.cli import COMMANDS, Command, rewritten, table
from fedmerge.cli.reference import main

PAGE = Path(__file__).parents[3] / "docs/reference/cli.md"


def test_the_tables_are_what_the_commands_give() -> None:
    """`python -m fedmerge.cli.reference docs/reference/cli.md` writes them again."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page)


def test_every_command_has_a_table() -> None:
    blocks = re.findall(r"^<!-- options: (\w+) -->$", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(blocks) == sorted(command.name for command in COMMANDS.values())


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_a_table_names_every_option_and_dial(command: Command) -> None:
    rows = table(command.name)
    for option in command.parameters:
        assert option.is_argument or f"`{option.typed[-1]}`" in rows
    for dial in command.dial_options:
        assert f"`--set {dial}=…`" in rows


def test_a_page_that_says_something_else_is_corrected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# a\n<!-- options: demo -->\nold\n<!-- end -->\nb\n<!-- options: eval -->\n")
    main(page)
    text = page.read_text()
    assert text.startswith(
        "# a\n<!-- options: demo -->\n\n| option | value | meaning | default |\n"
    )
    assert text.endswith("\n\n<!-- end -->\nb\n<!-- options: eval -->\n")
    assert "old" not in text
    assert "| `-q`, `--quiet` |  | Print errors only |  |" in text
