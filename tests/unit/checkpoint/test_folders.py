"""Output folders: whole or absent, and nobody else's files are lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedmerge.checkpoint import check_folder, new_folder, read_record, write_model
from fedmerge.errors import CheckpointError, UsageError
from fedmerge.values import TensorInfo

INFOS = {"fc.weight": TensorInfo((8, 8), "float32")}


def write(path: Path, value: float, *, force: bool = False) -> None:
    """Write a folder of a model with its record, and a file with the same value."""
    with new_folder(path, force=force) as folder:
        values = np.full((8, 8), value, np.float32)
        write_model(
            folder / "model.safetensors", INFOS, lambda _: values, record=lambda _: {"fedmerge": ""}
        )
        (folder / "value.txt").write_text(str(value))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_made_with_all_its_files_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "merged", 1.0)
    assert names(tmp_path) == ["merged"]
    assert names(tmp_path / "merged") == ["model.safetensors", "value.txt"]
    assert (tmp_path / "merged" / "value.txt").read_text() == "1.0"


def test_nothing_has_the_name_before_all_is_written(tmp_path: Path) -> None:
    with new_folder(tmp_path / "merged", force=False) as folder:
        (folder / "a.txt").write_text("a")
        assert not (tmp_path / "merged").exists()
        assert folder.parent == tmp_path
    assert names(tmp_path) == ["merged"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "merged", force=False) as folder:
            (folder / "a.txt").write_text("a")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert names(tmp_path) == []


def test_a_failure_leaves_the_older_folder(tmp_path: Path) -> None:
    write(tmp_path / "merged", 1.0)

    def fail() -> None:
        with new_folder(tmp_path / "merged", force=True) as folder:
            (folder / "a.txt").write_text("a")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert names(tmp_path) == ["merged"]
    assert (tmp_path / "merged" / "value.txt").read_text() == "1.0"


def test_a_full_folder_is_replaced_with_force_alone(tmp_path: Path) -> None:
    write(tmp_path / "merged", 1.0)
    with pytest.raises(UsageError, match="exists already"):
        check_folder(tmp_path / "merged", inputs=[], force=False)
    with pytest.raises(UsageError, match="exists already"):
        write(tmp_path / "merged", 2.0)
    check_folder(tmp_path / "merged", inputs=[], force=True)
    write(tmp_path / "merged", 2.0, force=True)
    assert names(tmp_path) == ["merged"]
    assert (tmp_path / "merged" / "value.txt").read_text() == "2.0"


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    check_folder(tmp_path / "merged", inputs=[], force=False)
    write(tmp_path / "merged", 1.0)
    assert names(tmp_path / "merged") == ["model.safetensors", "value.txt"]


@pytest.mark.parametrize("stranger", ["notes.txt", "model.safetensors"])
def test_folders_of_others_are_never_replaced(tmp_path: Path, stranger: str) -> None:
    (tmp_path / "home").mkdir()
    if stranger.endswith(".txt"):
        (tmp_path / "home" / stranger).write_text("mine")
    else:  # a model without a merge record
        values = np.ones((8, 8), np.float32)
        write_model(tmp_path / "home" / stranger, INFOS, lambda _: values)
    with pytest.raises(UsageError, match="never removed"):
        check_folder(tmp_path / "home", inputs=[], force=True)
    with pytest.raises(UsageError, match="never removed"):
        write(tmp_path / "home", 1.0, force=True)
    assert names(tmp_path / "home") == [stranger]


def test_a_merged_folder_with_folders_of_others_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "merged", 1.0)
    (tmp_path / "merged" / ".git").mkdir()
    with pytest.raises(UsageError, match="never removed"):
        write(tmp_path / "merged", 2.0, force=True)
    assert (tmp_path / "merged" / "value.txt").read_text() == "1.0"


def test_a_folder_that_was_made_meanwhile_stays(tmp_path: Path) -> None:
    def write_late() -> None:
        with new_folder(tmp_path / "merged", force=False) as folder:
            (folder / "a.txt").write_text("a")
            (tmp_path / "merged").mkdir()
            (tmp_path / "merged" / "theirs.txt").write_text("theirs")

    with pytest.raises(UsageError, match="exists already"):
        write_late()
    assert names(tmp_path) == ["merged"]
    assert names(tmp_path / "merged") == ["theirs.txt"]


def test_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "merged").write_text("a file")
    with pytest.raises(UsageError, match="exists already"):
        check_folder(tmp_path / "merged", inputs=[], force=True)
    with pytest.raises(UsageError, match="no folder"):
        write(tmp_path / "merged", 1.0, force=True)
    assert (tmp_path / "merged").read_text() == "a file"


def test_the_folder_around_it_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its folder does not exist"):
        check_folder(tmp_path / "no" / "merged", inputs=[], force=False)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "no" / "merged", 1.0)


def test_inputs_are_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a", 1.0)
    for source in (tmp_path / "a", tmp_path / "a" / "model.safetensors"):
        with pytest.raises(UsageError, match="also an input"):
            check_folder(tmp_path / "a", inputs=[source], force=True)
    check_folder(tmp_path / "a", inputs=[tmp_path / "b"], force=True)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "real", 1.0)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UsageError, match="exists already"):
        write(tmp_path / "link", 2.0, force=True)
    assert (tmp_path / "real" / "value.txt").read_text() == "1.0"


def test_leftovers_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    write(tmp_path / "merged", 1.0)
    (tmp_path / "merged").rename(tmp_path / ".fedmerge-merged.old")  # killed between two names
    write(tmp_path / "other", 2.0)
    assert names(tmp_path) == [".fedmerge-merged.old", "other"]
    with pytest.raises(UsageError, match="exists already"):
        write(tmp_path / "merged", 3.0)  # the old one is back
    assert names(tmp_path) == ["merged", "other"]
    assert (tmp_path / "merged" / "value.txt").read_text() == "1.0"


_WRITER = """
import itertools, sys
from pathlib import Path
from tests.unit.checkpoint.test_folders import write
for version in itertools.count():
    write(Path(sys.argv[1]), version, force=True)
    print(version, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_folder(tmp_path: Path) -> None:
    path, parked = tmp_path / "merged", tmp_path / ".fedmerge-merged.old"
    rng = random.Random(0)
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        whole = path if path.exists() else parked
        assert names(whole) == ["model.safetensors", "value.txt"]
        assert "fedmerge" in read_record(whole / "model.safetensors")
    write(path, -1.0, force=True)
    assert names(tmp_path) == ["merged"]
    assert (path / "value.txt").read_text() == "-1.0"
