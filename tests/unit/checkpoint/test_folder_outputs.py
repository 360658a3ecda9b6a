"""Folders are written whole or not at all, and replace nothing but merged folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedmerge import CheckpointError, UsageError
from fedmerge.checkpoint import (
    check_folder_output,
    claim_names,
    hidden_name,
    is_folder_name,
    write_folder,
)


def holding(text: str) -> Callable[[Path], None]:
    """Return what fills a folder as a merge does, with this text as its weights."""

    def fill(place: Path) -> None:
        (place / "config.json").write_text("{}")
        (place / "inner").mkdir()
        (place / "inner" / "note.txt").write_text(text)
        (place / "model.safetensors").write_bytes(_with_record())

    return fill


def _with_record() -> bytes:
    header = b'{"__metadata__":{"fedmerge":"{\\"fedmerge\\":\\"0\\"}"}}'
    return len(header).to_bytes(8, "little") + header


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix(): p.read_text(errors="replace") for p in files}


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", holding("one"), force=False)
    assert contents(tmp_path / "out")["inner/note.txt"] == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fail(place: Path) -> None:
        holding("half")(place)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot be written \\(No space left"):
        write_folder(tmp_path / "out", fail, force=False)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "out", holding("one"), force=False)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_folder(tmp_path / "out", fail, force=True)
    assert contents(tmp_path / "out")["inner/note.txt"] == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_name_that_was_taken_meanwhile_is_not_given(tmp_path: Path) -> None:
    def fill(place: Path) -> None:
        holding("mine")(place)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")

    with pytest.raises(UsageError, match="exists already"):
        write_folder(tmp_path / "out", fill, force=False)
    assert contents(tmp_path / "out") == {"theirs": "theirs"}


def test_force_replaces_a_merged_folder_as_a_whole(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", holding("one"), force=False)
    (tmp_path / "out" / "stale.txt").write_text("stale")
    write_folder(tmp_path / "out", holding("two"), force=True)
    found = contents(tmp_path / "out")
    assert found["inner/note.txt"] == "two"
    assert "stale.txt" not in found
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_folder_comes_back_where_the_new_one_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_folder(out, holding("one"), force=False)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if target == out and "-0.tmp" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_folder(out, holding("two"), force=True)
    assert contents(out)["inner/note.txt"] == "one"


def test_force_does_not_replace_what_fedmerge_did_not_write(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_folder_output(out, inputs=[], force=True)  # nothing is in it
    (out / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match="a folder that fedmerge did not write"):
        check_folder_output(out, inputs=[], force=True)
    with pytest.raises(UsageError, match="exists already"):
        check_folder_output(out, inputs=[], force=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is no folder"):
        check_folder_output(tmp_path / "file", inputs=[], force=True)
    with pytest.raises(UsageError, match="its folder does not exist"):
        check_folder_output(tmp_path / "none" / "out", inputs=[], force=False)


@pytest.mark.parametrize("place", ["run", "run/merged", "."])
def test_inputs_are_never_replaced(place: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "run", holding("input"), force=False)
    with pytest.raises(UsageError, match="the output is also an input"):
        check_folder_output(tmp_path / place, inputs=[tmp_path / "run"], force=True)
    check_folder_output(tmp_path / "other", inputs=[tmp_path / "run"], force=True)


def test_what_a_killed_run_left_is_swept(tmp_path: Path) -> None:
    claim = claim_names(tmp_path)
    left = hidden_name(claim, 0)
    left.mkdir()
    (left / "half").write_text("half")
    kept = tmp_path / "kept"
    shutil.copyfile(claim.path, kept)
    claim.release()
    shutil.move(kept, claim.path)  # nobody holds it any more
    write_folder(tmp_path / "out", holding("one"), force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_names_of_folders_end_like_no_file_of_ours() -> None:
    named = {name: is_folder_name(Path(name)) for name in ("merged", "a/b.v2", "m.pt", "m.PT2")}
    assert named == {"merged": True, "a/b.v2": True, "m.pt": False, "m.PT2": False}
