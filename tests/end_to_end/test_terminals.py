"""What a user sees: on terminals of every kind, in logs, and while completing a command."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.end_to_end.helpers import Cli, process

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PLAIN = {"TERM": "xterm-256color", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}


def on_terminal(*arguments: object, cwd: Path, columns: int = 80, **env: str) -> str:
    """Run a command on a terminal of its own and return all that it wrote there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "fedmerge", *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**PLAIN, **env},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as running:
        os.close(follower)
        written = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # nobody holds the other end any more
                part = b""
            if not part:
                break
            written += part
    os.close(leader)
    assert running.returncode == 0, written
    return written.decode().replace("\r\n", "\n")


def test_fedmerge_alone_shows_the_commands_that_matter(cli: Cli) -> None:
    outcome = cli.done()
    named = re.findall(r"^ {4}fedmerge (\w+)", outcome.out, re.M)
    assert sorted(set(named)) == ["compare", "demo", "match"]
    assert len(outcome.out.splitlines()) < 15
    assert outcome.err == ""


def test_match_ends_with_table_verdict_and_next_command(nets: list[Path], tmp_path: Path) -> None:
    written = on_terminal("match", *nets, "-o", "g.pt", cwd=tmp_path)
    shown = written[written.index("3 clients (a, b, c)") :]
    lines = [line.strip() for line in shown.splitlines()]
    verdict = [place for place, line in enumerate(lines) if line.startswith("quality: ")]
    assert verdict == [len(lines) - 3]
    assert "fedmerge compare " in lines[verdict[0]]
    assert "--global g.pt --model M --data FILE" in lines[verdict[0]]
    assert re.search("group.*clients.*global.*matched.*scatter", shown)
    assert lines[-1].startswith("fedmerge verify g.pt ")


def test_bars_show_a_rate_and_leave_no_trace(nets: list[Path], tmp_path: Path) -> None:
    written = on_terminal("match", *nets, "-o", "g.pt", cwd=tmp_path)
    assert re.search(r"matching .*\d+% \d+(\.\d+)?(/s| s each)", written)
    assert "\x1b[2K" in written  # lines are taken back


def test_a_dumb_terminal_gets_no_escape_codes(nets: list[Path], tmp_path: Path) -> None:
    written = on_terminal("match", *nets, "-o", "g.pt", cwd=tmp_path, columns=60, TERM="dumb")
    assert "\x1b" not in written
    assert "\r" not in written
    assert "fedmerge verify g.pt" in written


def test_no_color_is_obeyed(tmp_path: Path) -> None:
    assert COLOUR.search(on_terminal("match", "--help", cwd=tmp_path))
    assert not COLOUR.search(on_terminal("match", "--help", cwd=tmp_path, NO_COLOR="1"))


@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    written = ESCAPE.sub("", on_terminal("match", "--help", cwd=tmp_path, columns=columns))
    assert max(map(len, written.splitlines())) <= columns
    for heading in ("Output", "Matching", "Architecture", "Running", "Examples:"):
        assert heading in written


def test_a_name_sends_nothing_to_the_terminal(cli: Cli, nets: list[Path], tmp_path: Path) -> None:
    evil = nets[0].rename(nets[0].with_name("\x1b[31mred\x07.pt"))
    outcome = cli.done("match", evil, nets[1], "-o", tmp_path / "g.pt")
    assert "\x1b" not in outcome.out + outcome.err
    assert "\x07" not in outcome.out
    assert "2 clients (\\x1b[31mred\\x07, b)" in outcome.out


def test_a_ci_log_is_plain_text(tmp_path: Path) -> None:
    ci = {"CI": "true", "GITHUB_ACTIONS": "true", "PATH": os.environ["PATH"]}
    assert "\x1b" not in process("match", "--help", cwd=tmp_path, env=ci).out
    assert "\x1b" in process("match", "--help", cwd=tmp_path, env={**ci, "FORCE_COLOR": "1"}).out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fedmerge re", ["retrain", "report"]),
        ("fedmerge match --max", ["--max-growth"]),
        ("fedmerge match --method a", ["average"]),
        ("fedmerge retrain --task c", ["classification"]),
        ("fedmerge match --output a", []),  # left to the shell, which knows files
    ],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    asked = {**os.environ, "_FEDMERGE_COMPLETE": "complete_bash", **words}
    assert sorted(process(env=asked).out.split()) == sorted(offered)


def test_completion_is_shown_for_every_shell_that_it_is_installed_in(tmp_path: Path) -> None:
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # may have no shell
    for shell in ("bash", "zsh", "fish"):
        shown = process("--show-completion", shell, cwd=tmp_path, env=named).out
        assert "_FEDMERGE_COMPLETE" in shown
