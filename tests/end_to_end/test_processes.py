"""Real processes: killed while they write, and started only to answer --help."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import PATIENCE, Cli, error_lines, save_all

ROOT = Path(__file__).parents[2]
OPTIONS = ("--max-growth", "1", "--set", "threads=1")


@pytest.fixture
def large(tmp_path: Path) -> list[Path]:
    """Two clients that take long enough to write that a signal can hit the middle."""
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        states.append({"fc1.weight": torch.randn(30, 40_000), "fc2.weight": torch.randn(3, 30)})
    return save_all(states, tmp_path / "in")


def _moments(folder: Path) -> Iterator[bool]:
    """Yield whether hidden files are there, every half millisecond."""
    while True:
        yield any(path.name.startswith(".") for path in folder.iterdir())
        time.sleep(0.0005)


def _kill_while_writing(command: list[str], folder: Path, delay: float) -> int:
    """Start a command, kill it some time after its first hidden file, return its exit code."""
    running = subprocess.Popen(
        [sys.executable, "-m", "fedmerge", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for writing in _moments(folder):
        if writing or running.poll() is not None:
            break
    time.sleep(delay)
    running.kill()
    return running.wait(timeout=PATIENCE)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
@pytest.mark.parametrize(
    ("suffix", "delays"), [(".pt", (0.0, 0.004, 0.015)), (".safetensors", (0.002, 0.01))]
)
@pytest.mark.slow
def test_a_killed_merge_leaves_the_old_file_or_the_new_one(
    suffix: str, delays: tuple[float, ...], large: list[Path], tmp_path: Path, cli: Cli
) -> None:
    out, old, new = tmp_path / "out", tmp_path / f"old{suffix}", tmp_path / f"new{suffix}"
    cli.done("match", *large, "-o", old, "--method", "average")
    cli.done("match", *large, "-o", new, *OPTIONS)
    assert old.read_bytes() != new.read_bytes()
    output = out / f"global{suffix}"
    codes, verified = [], []
    for delay in delays:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for path in tmp_path.glob(f"old{suffix}*"):
            shutil.copy(path, out / path.name.replace("old", "global"))
        command = ["match", *map(str, large), "-o", str(output), *OPTIONS, "--force"]
        codes.append(_kill_while_writing(command, out, delay))
        assert output.read_bytes() in (old.read_bytes(), new.read_bytes())
        outcome = cli("verify", output, *large)
        assert "Traceback" not in outcome.err
        assert outcome.code == 0 or "has no merge record" in outcome.err
        verified.append(outcome.code)
    assert -signal.SIGKILL in codes
    assert set(verified) <= {0, 1}
    cli.done("match", *large, "-o", output, *OPTIONS, "--force")
    assert output.read_bytes() == new.read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="other signals there")
@pytest.mark.parametrize(("suffix", "delay"), [(".pt", 0.0), (".pt", 0.003), (".safetensors", 0.0)])
@pytest.mark.slow
def test_an_interrupted_process_exits_130_and_cleans_up(
    suffix: str, delay: float, large: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = ["match", *map(str, large), "-o", str(out / f"global{suffix}"), *OPTIONS]
    running = subprocess.Popen(
        [sys.executable, "-m", "fedmerge", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for writing in _moments(out):
        if writing or running.poll() is not None:
            break
    time.sleep(delay)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    left = {path.name for path in out.iterdir()}
    if f"global{suffix}" in left:  # the signal came after the last rename
        assert not [name for name in left if name.startswith(".")]
    else:
        assert running.returncode == 130
        assert left == set()


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    suffix: str, large: list[Path], tmp_path: Path, cli: Cli
) -> None:
    """A limit on the size of files stands in for the full disk."""
    import resource

    before = set(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        outcome = cli("match", *large, "-o", tmp_path / f"global{suffix}", *OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 1
    assert f"global{suffix}" in error_lines(outcome.err)[0]
    assert set(tmp_path.rglob("*")) == before


_LOADED = """
import sys
from fedmerge.cli import run
code = run(sys.argv[1:])
loaded = {name.partition(".")[0] for name in sys.modules}
print(code, *sorted(loaded - set(sys.stdlib_module_names)), file=sys.stderr)
"""
HEAVY = {"torch", "numpy", "scipy", "safetensors", "yaml", "ray", "matplotlib", "sklearn"}


def _loaded_by(*arguments: object) -> tuple[int, set[str]]:
    """Return a command's exit code, and the packages that it loads."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=PATIENCE,
    )
    code, *names = done.stderr.splitlines()[-1].split()
    return int(code), set(names)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["match", "--help"], ["match", "--wrong"]]
)
def test_help_and_version_load_no_heavy_library(arguments: list[str]) -> None:
    code, names = _loaded_by(*arguments)
    assert code == (2 if "--wrong" in arguments else 0)
    assert names & {"fedmerge", *HEAVY} == {"fedmerge"}


@pytest.mark.slow
def test_a_command_that_reads_files_loads_what_help_does_not(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(2, 3)}, tmp_path / "a.pt")
    code, names = _loaded_by("inspect", tmp_path / "a.pt")
    assert code == 0
    assert names >= {"fedmerge", "torch", "numpy"}


_WATCHED = """
import sys
from fedmerge.cli import run
code = run(sys.argv[1:])
print(code, sorted(name for name in sys.modules if name.startswith("fedmerge.")), file=sys.stderr)
"""


def test_files_alone_are_merged_without_what_runs_models(tmp_path: Path) -> None:
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for seed, file in enumerate(files):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        torch.save(net.state_dict(), file)
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, "match", *map(str, files), "-o", str(tmp_path / "g.pt")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=PATIENCE,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("0 [")
    assert "fedmerge.matching.sweeps" in last
    for part in (
        "fedmerge.probes.probe_inputs",
        "fedmerge.training",
        "fedmerge.architecture.from_code",
    ):
        assert part not in last
    assert set(re.findall(r"'fedmerge\.probes\.(\w+)'", last)) <= {"options"}


def _processor_time(*arguments: str) -> float:
    """Return the seconds that a Python computes, however busy the machine is."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)
    return os.times().children_user - before.children_user


@pytest.mark.skipif(sys.platform == "win32", reason="no times of children there")
@pytest.mark.slow
def test_the_version_is_there_long_before_torch_could_be() -> None:
    """A tenth of the time that torch takes to load; a third is asked for, on any machine."""
    least = min(_processor_time("-m", "fedmerge", "--version") for _ in range(3))
    assert least < _processor_time("-c", "import torch") / 3


def test_a_reader_that_goes_away_gets_no_traceback(large: list[Path]) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "fedmerge", "inspect", *map(str, large)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    err = running.stderr.read()
    running.stderr.close()
    running.wait(timeout=PATIENCE)
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
