"""Names that are given once, and hidden files that outlive nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from fedmerge.checkpoint import (
    ABANDONED,
    LockFile,
    Staging,
    leave_nothing,
    naming_alone,
    open_checkpoint,
    read_record,
    staging,
    write_bytes,
    write_model,
    written_path,
)
from fedmerge.errors import UsageError
from fedmerge.values import TensorInfo

INFOS = {f"fc{number}.weight": TensorInfo((8, 8), "float32") for number in range(3)}
PATIENCE = 120  # seconds for another process


def write(path: Path, value: float, **options: Any) -> None:
    values = np.full((8, 8), value, np.float32)
    write_model(path, INFOS, lambda _: values, record=lambda _: {"value": value}, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def before_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen in the moment before files get their names."""
    commit = Staging.commit

    def late(self: Staging, **options: Any) -> None:
        monkeypatch.setattr(Staging, "commit", commit)
        act()
        commit(self, **options)

    monkeypatch.setattr(Staging, "commit", late)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(
    ("output", "taken", "size"),
    [
        ("g.pt", "g.pt", None),
        ("g.pt", "g.pt.json", None),
        ("g.safetensors", "g.safetensors", None),
        ("g.safetensors", "g-00002-of-00003.safetensors", 300),
        ("g.safetensors", "g.safetensors.index.json", 300),
    ],
)
def test_a_name_that_was_taken_meanwhile_is_refused_and_nothing_is_left(
    output: str,
    taken: str,
    size: int | None,
    links: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    before_commit(monkeypatch, lambda: (tmp_path / taken).write_bytes(b"mine"))
    with pytest.raises(UsageError, match=f"{taken}: exists already, it was written meanwhile"):
        write(tmp_path / output, 1.0, shard_size=size)
    assert contents(tmp_path) == {taken: b"mine"}


def no_links(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("output", ["g.pt", "g.safetensors"])
def test_the_same_content_may_be_there_again_but_no_other(output: str, tmp_path: Path) -> None:
    write(tmp_path / output, 1.0)
    before = contents(tmp_path)
    write(tmp_path / output, 1.0, again=True)
    assert contents(tmp_path) == before
    with pytest.raises(UsageError, match=r"g\.\w+(\.json)?: exists already"):
        write(tmp_path / output, 2.0, again=True)
    assert contents(tmp_path) == before


def test_a_model_whose_record_alone_was_named_is_completed(tmp_path: Path) -> None:
    """As a kill between the two leaves it."""
    write(tmp_path / "g.pt", 1.0)
    whole = contents(tmp_path)
    (tmp_path / "g.pt").unlink()
    write(tmp_path / "g.pt", 1.0, again=True)
    assert contents(tmp_path) == whole


def test_an_old_record_is_never_beside_a_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "g.pt", 1.0)
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append((target.name, (tmp_path / "g.pt.json").exists()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write(tmp_path / "g.pt", 2.0, force=True)
    assert seen == [("g.pt", False), ("g.pt.json", False)]
    assert read_record(tmp_path / "g.pt") == {"value": 2.0}


_RACER = """
import sys, time
from pathlib import Path
import numpy as np
from fedmerge.checkpoint import write_model
from fedmerge.errors import UsageError
from fedmerge.values import TensorInfo

path, value, start, force, size = Path(sys.argv[1]), float(sys.argv[2]), *map(float, sys.argv[3:])
infos = {f"fc{k}.weight": TensorInfo((8, 8), "float32") for k in range(3)}
values = np.full((8, 8), value, np.float32)
time.sleep(max(0.0, start - time.time()))
try:
    for _ in range(20 if force else 1):
        write_model(path, infos, lambda _: values, force=bool(force), shard_size=int(size) or None,
                    record=lambda _: {"value": value})
except UsageError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("output", "size"), [("g.pt", 0), ("g.safetensors", 0), ("g.safetensors", 300)]
)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.slow
def test_of_runs_that_write_at_once_one_wins_with_all_its_files(
    output: str, size: int, force: bool, tmp_path: Path
) -> None:
    path, start = tmp_path / output, time.time() + 6
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, path, *map(str, (value, start, int(force), size))],
            stderr=subprocess.PIPE,
            text=True,
        )
        for value in (1, 2, 3)
    ]
    ends = [(racer.communicate(timeout=PATIENCE)[1], racer.returncode) for racer in racers]
    lost = [said for said, code in ends if code]
    assert len(lost) == (0 if force else 2), ends
    assert all("exists already" in said for said in lost)
    opened = written_path(path, sharded=bool(size))
    model = open_checkpoint(opened)
    values = {float(value) for name in model.tensors for value in model.read(name).flat}
    assert values == {read_record(opened)["value"]}
    assert not [name for name in names(tmp_path) if name.startswith(".")]


_LEFT = """
import os, signal, sys
from pathlib import Path
from fedmerge.checkpoint import staging

with staging() as stage:
    for name in ("a", "b"):
        stage.create(Path(sys.argv[1], name)).write(b"half")
        stage.finish(Path(sys.argv[1], name))
    print("ready", flush=True)
    sys.stdin.read()
"""


def writer(folder: Path) -> subprocess.Popen[str]:
    """Return a process that has written two hidden files and waits."""
    running = subprocess.Popen(
        [sys.executable, "-c", _LEFT, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    return running


def end(running: subprocess.Popen[str]) -> None:
    running.kill()
    running.communicate(timeout=PATIENCE)


@pytest.mark.skipif(sys.platform == "win32", reason="by age alone there")
@pytest.mark.slow
def test_the_next_writer_sweeps_out_what_killed_ones_left_but_nothing_of_those_alive(
    tmp_path: Path,
) -> None:
    killed, alive = writer(tmp_path), writer(tmp_path)
    assert len(names(tmp_path)) == 6
    end(killed)
    (tmp_path / ".fedmerge-mine.tmp").write_bytes(b"no name of ours")
    write_bytes(tmp_path / "c", b"whole", force=False)
    left = [name for name in names(tmp_path) if name.startswith(".")]
    assert len(left) == 4
    end(alive)
    write_bytes(tmp_path / "d", b"whole", force=False)
    assert names(tmp_path) == [".fedmerge-mine.tmp", "c", "d"]


@pytest.mark.skipif(sys.platform == "win32", reason="by age alone there")
@pytest.mark.parametrize("why", ["another system", "no locks", "no claim"])
def test_where_nobody_can_be_asked_files_are_left_for_a_day(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(writer(tmp_path))
    if why == "another system":
        monkeypatch.setattr("fedmerge.checkpoint.outputs._system", lambda: "0" * 8)
    elif why == "no locks":
        monkeypatch.setattr("fedmerge.checkpoint.outputs.fcntl.flock", no_links_at_all)
    else:
        min(tmp_path.iterdir(), key=lambda path: len(path.name)).unlink()
    left = names(tmp_path)
    write_bytes(tmp_path / "c", b"whole", force=False)
    assert names(tmp_path) == [*left, "c"]
    old = time.time() - ABANDONED - 60
    for name in left:
        os.utime(tmp_path / name, (old, old))
    write_bytes(tmp_path / "d", b"whole", force=False)
    assert names(tmp_path) == ["c", "d"]


def no_links_at_all(*_: object) -> None:
    raise OSError(95, "Operation not supported")


def test_a_claim_that_a_sweep_took_for_a_dead_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, asked = LockFile.take, []

    def swept(path: Path, **options: Any) -> LockFile | None:
        asked.append(path)
        return take(path, **options) if len(asked) > 1 else None

    monkeypatch.setattr(LockFile, "take", swept)
    with staging() as stage:
        stage.create(tmp_path / "a").write(b"x")
        stage.commit(force=False)
    assert len(set(asked)) == 2
    assert names(tmp_path) == ["a"]


def test_a_lock_is_held_once_and_its_file_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = LockFile.take(path)
    assert first is not None
    assert LockFile.take(path) is None
    assert LockFile.take(path, patience=0.05) is None
    first.release()
    assert names(tmp_path) == []
    again = LockFile.take(path)
    assert again is not None
    again.release()


def test_a_lock_file_that_nobody_holds_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"left")
    lock = LockFile.take(tmp_path / "lock")
    assert lock is not None
    lock.release()


@pytest.mark.skipif(sys.platform == "win32", reason="no links there")
def test_a_lock_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        LockFile.take(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


class Interrupting:
    """Raises at the n-th step of Python in the code that writes, as a signal may."""

    files = ("outputs.py", "contextlib.py")

    def __init__(self, step: int) -> None:
        self.step, self.is_done = step, False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupting | None:
        if self.is_done or not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        self.step -= event == "opcode"
        if self.step < 0:
            self.is_done = True
            raise KeyboardInterrupt
        return self


# Between its opening and what closes it a file has only Python to close it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_an_interrupt_at_any_step_leaves_all_or_nothing(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    steps, whole = 0, {"a": b"new a", "b": b"new b"}
    while True:
        folder = tmp_path / str(steps)
        folder.mkdir()
        if force:
            (folder / "a").write_bytes(b"old a")
        interrupting = Interrupting(steps)
        sys.settrace(interrupting)
        try:
            with staging() as stage:
                for name, content in whole.items():
                    stage.create(folder / name).write(content)
                with naming_alone(folder):
                    stage.commit(force=force)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        leave_nothing()
        found = contents(folder)
        if not interrupting.is_done:
            break
        assert (steps, found) in ((steps, {"a": b"old a"} if force else {}), (steps, whole))
        steps += 1
    assert steps > 500
    assert found == whole
