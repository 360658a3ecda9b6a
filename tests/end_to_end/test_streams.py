"""Results on stdout, everything else on stderr, and JSON that a script can trust."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import Cli, Outcome, error_lines, listing, process, save
from tests.end_to_end.malice import Payload, save_raw


@pytest.fixture
def broken(nets: list[Path], tmp_path: Path) -> dict[str, tuple[list[str], int, str]]:
    """Return, by kind of error, a command, its exit code and the error's class."""
    folder = tmp_path / "broken"
    folder.mkdir()
    first, out = str(nets[0]), str(tmp_path / "global.pt")
    (folder / "empty.pt").write_bytes(b"")
    save_raw(Payload(tmp_path / "ran"), folder / "evil.pt")
    save({"layer1.0.downsample.0.weight": torch.ones(3, 3)}, folder / "residual.pt")

    def match(*arguments: str) -> list[str]:
        return ["match", *arguments, "-o", out]

    return {
        "unknown option": (match(first, first, "--wrong"), 2, "UsageError"),
        "missing argument": (["match"], 2, "UsageError"),
        "unknown command": (["mtach"], 2, "UsageError"),
        "bad value": (match(first, first, "--set", "gamma=-3"), 2, "UsageError"),
        "no number": (match(first, first, "--set", "gamma=x"), 2, "UsageError"),
        "one client": (match(first), 2, "UsageError"),
        "unsafe": (match(first, str(folder / "evil.pt")), 4, "UnsafeCheckpointError"),
        "architecture": (match(*[str(folder / "residual.pt")] * 2), 3, "ArchitectureError"),
        "checkpoint": (match(first, str(folder / "empty.pt")), 1, "CheckpointError"),
        "missing file": (match(first, str(folder / "absent.pt")), 1, "CheckpointError"),
    }


KINDS = [
    *("unknown option", "missing argument", "unknown command", "bad value", "no number"),
    *("one client", "unsafe", "architecture", "checkpoint", "missing file"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_one_line_and_a_hint_on_stderr(
    kind: str, broken: dict[str, tuple[list[str], int, str]], tmp_path: Path, cli: Cli
) -> None:
    command, code, _ = broken[kind]
    before = listing(tmp_path)
    cli.refused(*command, code=code)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_with_json_is_one_object_with_the_same_code(
    kind: str, broken: dict[str, tuple[list[str], int, str]], cli: Cli
) -> None:
    command, code, name = broken[kind]
    plain, outcome = cli(*command), cli(*command, "--json")
    assert outcome.code == plain.code == code
    error = outcome.json["error"]
    assert set(error) == {"kind", "problem", "hint", "exit_code"}
    assert (error["kind"], error["exit_code"]) == (name, code)
    lines = error_lines(plain.err)
    assert lines[0] == f"error: {error['problem']}" or kind == "unknown command"
    assert lines[1:] == ([f"hint: {error['hint']}"] if error["hint"] else [])


def test_long_paths_do_not_wrap(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / ("long-" * 30) / ("longer-" * 30)
    folder.mkdir(parents=True)
    (folder / "empty.pt").write_bytes(b"")
    outcome = cli.refused("match", nets[0], folder / "empty.pt", code=1)
    assert str(folder / "empty.pt") in outcome.err.splitlines()[0]


def test_a_line_break_in_a_file_name_does_not_break_the_error_line(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "emp\nty.pt").write_bytes(b"")
    cli.refused("match", nets[0], tmp_path / "emp\nty.pt", "-o", tmp_path / "g.pt", code=1)


def commands(nets: list[Path], folder: Path, cli: Cli) -> dict[str, list[str]]:
    """Return one successful command of each kind."""
    files = [str(path) for path in nets]
    cli.done("match", *files, "-o", folder / "earlier.pt")
    return {
        "match": ["match", *files, "-o", str(folder / "global.pt")],
        "dry run": ["match", *files, "-o", str(folder / "global.pt"), "--dry-run"],
        "plan": ["plan", *files],
        "inspect": ["inspect", *files],
        "verify": ["verify", str(folder / "earlier.pt"), *files],
        "convert": ["convert", files[0], "-o", str(folder / "plain.safetensors")],
    }


COMMANDS = pytest.mark.parametrize(
    "name", ["match", "dry run", "plan", "inspect", "verify", "convert"]
)


@COMMANDS
def test_json_is_one_object_and_nothing_else(
    name: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    assert cli.done(*commands(nets, tmp_path, cli)[name], "--json").json


@COMMANDS
def test_json_also_when_verbose_or_quiet(
    name: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    command = commands(nets, tmp_path, cli)[name]
    assert cli.done(*command, "--json", "-v").json
    if name in ("match", "convert"):
        command.append("--force")
    assert cli.done(*command, "--json", "-q").json


@COMMANDS
def test_quiet_success_prints_nothing(
    name: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    command = commands(nets, tmp_path, cli)[name]
    assert cli.done(*command, "-q") == Outcome(0, "", "")


@COMMANDS
def test_results_are_on_stdout_without_colour_or_notes(
    name: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    outcome = cli.done(*commands(nets, tmp_path, cli)[name])
    assert outcome.out or name == "convert"
    for stream in (outcome.out, outcome.err):
        assert "\x1b" not in stream
        assert "\r" not in stream
    assert not any(
        line.startswith(("note:", "warning:", "error:")) for line in outcome.out.splitlines()
    )


def test_match_says_on_stderr_that_it_assumes_a_chain(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    outcome = cli.done("match", *nets, "-o", tmp_path / "global.pt")
    assert [line for line in outcome.err.splitlines() if "plain chain" in line]
    assert "plain chain" not in outcome.out


def test_the_json_of_match_says_what_the_table_says(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    summary = cli.done("match", *nets, "-o", tmp_path / "global.pt", "--json").json
    table = cli.done("match", *nets, "-o", tmp_path / "global.pt", "--force").out
    assert summary["clients"] == ["a", "b", "c"]
    assert summary["output"] == str(tmp_path / "global.pt")
    assert f"{summary['parameters']:,}" in table
    for group in summary["groups"]:
        row = next(line.split() for line in table.splitlines() if group["name"] in line.split())
        assert row[:3] == [group["name"], str(group["client_widths"][0]), str(group["width"])]


def test_the_last_line_of_match_is_a_command_that_works(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    outcome = cli.done("match", *nets, "-o", tmp_path / "global.pt")
    program, *command = shlex.split(outcome.last_line)
    assert program == "fedmerge"
    assert command[0] == "verify"
    assert "recomputed from its 3 clients" in cli.done(*command).out


@pytest.mark.parametrize("argument", ["folder", "glob", "spaces", "config"])
def test_the_last_line_of_match_works_for_any_kind_of_argument(
    argument: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    folder = nets[0].parent
    if argument == "spaces":
        folder = folder.rename(tmp_path / "my clients' files")
    if argument == "config":
        cli.done("match", folder, "-o", tmp_path / "earlier.pt")
        (tmp_path / "earlier.pt.json").rename(folder / "record.json")
    arguments: dict[str, list[str | Path]] = {
        "folder": [folder, "-o", folder / "global.pt"],
        "glob": [folder / "*.pt", "-o", folder / "global.pt"],
        "spaces": [folder / "a.pt", folder / "b.pt", "-o", tmp_path / "global model.pt"],
        "config": ["--config", folder / "record.json", "-o", tmp_path / "global.pt"],
    }
    outcome = cli.done("match", *arguments[argument])
    _, *command = shlex.split(outcome.last_line)
    assert "recomputed from its" in cli.done(*command).out


def test_nothing_asked_for_shows_the_help(cli: Cli) -> None:
    outcome = cli()
    assert outcome.code in (0, 2)
    assert "match" in outcome.out + outcome.err


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", ["match", "plan", "inspect", "verify", "convert", "demo"])
def test_every_command_has_help(command: str, flag: str, cli: Cli) -> None:
    assert "Usage" in cli.done(command, flag).out


def test_an_interrupted_merge_exits_130_and_leaves_nothing(
    nets: list[Path], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedmerge.checkpoint.outputs.Staging.commit", interrupt)
    before = listing(tmp_path)
    outcome = cli("match", *nets, "-o", tmp_path / "global.pt")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    assert listing(tmp_path) == before


def test_a_real_process_keeps_streams_and_code_apart(nets: list[Path], tmp_path: Path) -> None:
    good = process("match", *nets, "-o", "global.pt", "--max-growth", "none", cwd=tmp_path)
    assert good.code == 0
    assert good.last_line.startswith("fedmerge verify global.pt ")
    assert "plain chain" in good.err
    bad = process("match", *nets, "-o", "global.pt", "--json", cwd=tmp_path)
    assert bad.code == 2
    assert bad.json["error"]["exit_code"] == 2
    assert len(error_lines(bad.err)) == 2


def test_a_terminal_without_unicode_gets_a_result_and_no_traceback(
    nets: list[Path], tmp_path: Path
) -> None:
    outcome = process(
        *("match", *nets, "-o", "global.pt", "--max-growth", "none"),
        cwd=tmp_path,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
    )
    assert "Traceback" not in outcome.err
    assert outcome.code == 0
    assert outcome.last_line.startswith("fedmerge verify global.pt ")


def test_json_keeps_names_that_are_not_ascii(tmp_path: Path, nets: list[Path], cli: Cli) -> None:
    odd = nets[0].rename(tmp_path / "modèle.pt")
    outcome = cli.done("match", odd, nets[1], "-o", tmp_path / "g.pt", "--json")
    assert json.loads(outcome.out)["clients"] == ["modèle", "b"]
