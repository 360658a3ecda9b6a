"""Streams that are closed, full, or read by nobody: clean lines, codes, and whole files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.helpers import PATIENCE, Cli, Outcome, error_lines
from tests.end_to_end.retraining import make_scene

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such devices there"),
]

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


def redirected(streams: str, *arguments: object) -> Outcome:
    """Run a command as a shell does that closes streams or leads them elsewhere."""
    line = f'exec "$@" {streams}'
    command = [sys.executable, "-m", "fedmerge", *map(str, arguments)]
    done = subprocess.run(
        ["sh", "-c", line, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("streams", CLOSED)
def test_what_a_closed_stream_would_get_is_in_no_file(
    streams: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    cli.done("match", *nets, "-o", tmp_path / "whole.pt")
    done = redirected(streams, "match", *nets, "-o", tmp_path / "g.pt", "-v")
    assert done.code == 0
    for end in ("", ".json"):
        found, whole = (tmp_path / f"{name}.pt{end}" for name in ("g", "whole"))
        assert found.read_bytes() == whole.read_bytes()
    assert ("fedmerge verify" in done.out) == (">&-" not in streams.replace("2>&-", ""))


def test_workers_have_streams_although_the_command_has_none(tmp_path: Path, cli: Cli) -> None:
    scene = make_scene(tmp_path)
    net = tmp_path / "net.py"
    net.write_text("import sys\nprint('out'); print('err', file=sys.stderr)\n" + net.read_text())
    cli.done(*scene.command("whole.pt"))
    done = redirected(CLOSED[-1], *scene.command("g.pt"), "--engine", "processes", "--workers", 2)
    assert done == Outcome(0, "", "")
    assert (tmp_path / "g.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_error_without_stderr_has_its_code_and_is_not_among_the_results(
    more: list[str], tmp_path: Path
) -> None:
    done = redirected("2>&-", "inspect", tmp_path / "absent.pt", *more)
    assert done.code == 1
    if more:
        assert json.loads(done.out)["error"]["exit_code"] == 1
    else:
        assert done.out == ""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect"], ["absent"]])
def test_results_that_do_not_fit_anywhere_are_one_line_and_code_1(
    arguments: list[str], nets: list[Path], tmp_path: Path
) -> None:
    given: dict[str, list[object]] = {
        "inspect": ["inspect", *nets, "--json"],
        "absent": ["inspect", tmp_path / "absent.pt", "--json"],
    }
    done = redirected(">/dev/full", *given.get(arguments[0], arguments))
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last == "error: the output can't be printed: No space left on device"


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-"])
def test_messages_that_nobody_gets_change_nothing(
    streams: str, nets: list[Path], tmp_path: Path
) -> None:
    done = redirected(streams, "match", *nets, "-o", tmp_path / "g.pt", "-v")
    assert done.code == 0
    assert done.last_line.startswith("fedmerge verify")
    refused = redirected(streams, "match", *nets, "-o", tmp_path / "g.pt")
    assert refused == Outcome(2, "", "")


@pytest.mark.parametrize("number", [1, 2])
def test_a_reader_that_is_gone_gets_no_traceback(
    number: int, nets: list[Path], tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedmerge", "match", *map(str, nets)]
    streams = {1: subprocess.PIPE, 2: subprocess.PIPE, number: writer}
    running = subprocess.Popen(
        [*command, "-o", str(tmp_path / "g.pt")], stdout=streams[1], stderr=streams[2], text=True
    )
    os.close(writer)
    out, err = running.communicate(timeout=PATIENCE)
    assert (tmp_path / "g.pt").exists()
    assert "Traceback" not in (err or "")
    assert running.returncode == (1 if number == 1 else 0)
    if number == 2:
        assert out.splitlines()[-1].startswith("fedmerge verify")


def test_a_stream_that_does_not_block_gets_everything(nets: list[Path]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-m", "fedmerge", "inspect", *map(str, nets * 300), "--json"]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as running:
        os.close(writer)
        with os.fdopen(reader) as results:
            text = results.read()
        assert running.stderr is not None
        err = running.stderr.read()
    assert (running.returncode, err) == (0, "")
    assert len(text) > 100_000
    assert json.loads(text)


def test_a_work_dir_that_cannot_be_written_is_one_line_and_code_2(tmp_path: Path) -> None:
    """A file where a folder should be stands in for a read-only one: root may write anywhere."""
    scene = make_scene(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    done = redirected("", *scene.command("g.pt", "--work-dir", tmp_path / "file" / "work"))
    assert done.code == 2
    assert "work: cannot be written (Not a directory)" in error_lines(done.err)[0]
    assert sorted(tmp_path.rglob("*")) == before


_PRINTING = """
import os, sys
from fedmerge.cli.exit_codes import printed
from fedmerge.process import guard_messages, guard_results

guard_results()
guard_messages()


def command():
    print("first")
    {closing}
    print("second")
    print("message", file=sys.stderr)
    return 0


sys.exit(printed(command))
"""


@pytest.mark.parametrize(
    ("closing", "expected"),
    [
        ("pass", Outcome(0, "first\nsecond\n", "message\n")),
        ("sys.stdout.close()", Outcome(0, "first\nsecond\n", "message\n")),
        ("sys.stderr.close()", Outcome(0, "first\nsecond\n", "message\n")),
        ("os.close(2)", Outcome(0, "first\nsecond\n", "")),
        (
            "os.close(1)",
            Outcome(1, "", "message\nerror: the output can't be printed: Bad file descriptor\n"),
        ),
    ],
)
def test_streams_that_code_closes_meanwhile(closing: str, expected: Outcome) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRINTING.format(closing=closing)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert Outcome(done.returncode, done.stdout, done.stderr) == expected
