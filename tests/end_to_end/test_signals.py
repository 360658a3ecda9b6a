"""Ctrl-C and SIGTERM that come early, while modules are still imported, or at work."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedmerge.cli.boundary import run
from fedmerge.cli.signals import Interrupted, at_work
from tests.end_to_end.helpers import PATIENCE
from tests.end_to_end.retraining import make_scene

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="other signals there")

IMPORTING = "import time:"  # how Python begins a line about a module that it has imported
SIGNALS = [signal.SIGINT, signal.SIGTERM]


def signalled(arguments: list[str], module: str, number: int) -> tuple[int, str, list[str]]:
    """Return code, output and messages of a command signalled as soon as it imported a module."""
    running = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "fedmerge", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith(IMPORTING) and line.split("|")[-1].strip() == module:
            break
    assert running.poll() is None, f"{module} was not imported"
    running.send_signal(number)
    out, err = running.communicate(timeout=PATIENCE)
    return running.returncode, out, [x for x in err.splitlines() if not x.startswith(IMPORTING)]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["typer", "numpy", "torch"])
def test_a_signal_while_modules_are_imported_is_one_line_and_code_130(
    module: str, number: int, tmp_path: Path
) -> None:
    command = make_scene(tmp_path).command("g.pt")
    before = sorted(tmp_path.rglob("*"))
    assert signalled(command, module, number) == (130, "", ["interrupted"])
    assert sorted(tmp_path.rglob("*")) == before


def test_every_command_ends_like_this(tmp_path: Path) -> None:
    command = ["match", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    assert signalled(command, "fedmerge.cli.app", signal.SIGTERM) == (130, "", ["interrupted"])


def test_a_signal_that_the_starter_ignores_stays_ignored() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import os, sys; "
    code += "from fedmerge.cli.signals import at_work, end_at_once; end_at_once(); "
    code += "os.kill(os.getpid(), signal.SIGINT)\n"
    code += "with at_work(): os.kill(os.getpid(), signal.SIGINT); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("still here\n", "")


@pytest.mark.parametrize("number", SIGNALS)
def test_at_work_a_signal_lets_the_block_clean_up(number: int) -> None:
    cleaned = []
    before = signal.getsignal(number)

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)

    with pytest.raises(Interrupted, match=r"^stopped$"), at_work("stopped"):
        work()
    assert cleaned == [number]
    assert signal.getsignal(number) is before


def test_an_interrupt_that_an_import_turned_into_an_error_is_one_still() -> None:
    def load(number: int | None) -> None:
        try:
            if number is not None:
                signal.raise_signal(number)
        finally:
            raise ImportError("a module failed")

    with pytest.raises(Interrupted, match=r"^interrupted$"), at_work():
        load(signal.SIGTERM)
    with pytest.raises(ImportError, match=r"^a module failed$"), at_work():
        load(None)


def test_an_interrupted_command_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fedmerge.cli.inspect.run", interrupt)
    assert run(["inspect", "a.pt"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
