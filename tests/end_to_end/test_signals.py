"""Ctrl-C and SIGTERM that come early, while modules are still imported, or at work."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
import torch

from fedmerge.cli import Interrupted, at_work, run
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
    code += "from fedmerge.cli import at_work, end_at_once; end_at_once(); "
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


def python(code: str) -> tuple[int, str, str]:
    """Return code, output and messages of a Python program."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done.returncode, done.stdout, done.stderr


AT_WORK = """
import os, signal, time
from fedmerge.cli import exit_codes as signals
from fedmerge.cli import printed
signals.end_at_once()

def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)

"""


def test_a_second_signal_lets_the_block_clean_up_still() -> None:
    code = f"{AT_WORK}try:\n with signals.at_work('stopped'):\n  try: send()\n  finally:\n"
    code += "   send(signal.SIGINT); send(); print('cleaned')\n"
    code += "except signals.Interrupted as error: send(); print(error)"
    assert python(code) == (0, "cleaned\nstopped\n", "")


def test_a_second_signal_ends_work_that_does_not_end_itself() -> None:
    code = f"{AT_WORK}signals.PATIENCE = 0.05\nwith signals.at_work('stopped'):\n try: send()\n"
    code += " finally:\n  time.sleep(0.1); send(); print('still here')"
    assert python(code) == (130, "", "stopped\n")


def test_a_signal_in_a_destructor_is_not_lost() -> None:
    code = f"{AT_WORK}class Dying:\n def __del__(self): send()\n"
    code += "try:\n with signals.at_work():\n  one = Dying(); del one; time.sleep(60)\n"
    code += "except signals.Interrupted: print('heard')"
    assert python(code) == (0, "heard\n", "")


def test_other_exceptions_in_destructors_are_told_as_ever() -> None:
    code = f"{AT_WORK}class Dying:\n def __del__(self): raise ValueError('odd')\n"
    code += "with signals.at_work():\n one = Dying(); del one"
    out = python(code)
    assert out[:2] == (0, "")
    assert out[2].endswith("ValueError: odd\n")


def test_a_signal_while_python_takes_itself_down_changes_no_code() -> None:
    code = f"{AT_WORK}class Dying:\n def __del__(self, kill=os.kill, own=os.getpid()): "
    code += "kill(own, 15)\nkept = Dying(); print('done')"
    assert python(code) == (0, "done\n", "")
    assert python(code.replace("signals.end_at_once()", ""))[0] == -signal.SIGTERM


@pytest.mark.slow
def test_an_interrupt_that_leaves_an_exec_does_not_end_python_by_a_signal(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import signal\nexec('signal.raise_signal(signal.SIGINT)')\ndef build(): ...\n"
    )
    torch.save({"fc.weight": torch.zeros(2, 2)}, tmp_path / "a.pt")
    done = subprocess.run(
        [sys.executable, "-m", "fedmerge", "plan", "a.pt", "--model", "model.py:build"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "interrupted"


class Stepping:
    """Sends signals at the n-th step of Python in the code that answers them."""

    files = ("exit_codes.py", "contextlib.py", "app.py")

    def __init__(self, step: int, numbers: list[int]) -> None:
        self.step, self.numbers, self.is_done = step, numbers, False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Stepping | None:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_name != "interrupt":
            self.step -= getattr(signal.getsignal(signal.SIGINT), "__name__", "") == "interrupt"
            if self.step < 0 and not self.is_done:
                self.is_done = True
                signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)  # they come together
                for number in self.numbers:
                    signal.pthread_kill(threading.get_ident(), number)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
        return self


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [SIGNALS[:1], SIGNALS[::-1]], ids=["one", "two"])
def test_signals_at_any_step_are_one_line_and_code_130(
    numbers: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedmerge.cli.inspect.run", lambda *_: 0)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    steps = 0
    while True:
        stepping = Stepping(steps, numbers)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        sys.settrace(stepping)
        try:
            code = run(["inspect", "a.pt"])
        finally:
            sys.settrace(None)
            for number, handler in before.items():
                signal.signal(number, handler)
        if not stepping.is_done:
            break
        assert (steps, code, capfd.readouterr()) == (steps, 130, ("", "interrupted\n"))
        steps += 1
    assert steps > 100
    assert code == 0


@pytest.mark.parametrize("engine", ["local", "processes"])
@pytest.mark.slow
def test_signals_in_a_row_are_one_line_and_code_130_and_leave_nothing(
    engine: str, tmp_path: Path
) -> None:
    scene = make_scene(tmp_path)
    for client in "abc":
        scene.trouble(client, *["nap"] * 30)
    events = tmp_path / "events.jsonl"
    command = scene.command("g.pt", "--events", events, "--engine", engine, shards=scene.function)
    running = subprocess.Popen(
        [sys.executable, "-m", "fedmerge", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + PATIENCE
    while "client-started" not in (events.read_text() if events.exists() else ""):
        assert time.monotonic() < until
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        running.send_signal(number)
    out, err = running.communicate(timeout=PATIENCE)
    assert (running.returncode, out) == (130, "")
    messages = [line for line in err.splitlines() if not line.startswith(("note: ", "round "))]
    assert messages == ["stopped; the same command with --resume goes on after the last full round"]
    assert not list(tmp_path.rglob(".fedmerge*"))
