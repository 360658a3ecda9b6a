import os
from pathlib import Path

import pytest

from fedmerge.checkpoint import client_names, expand_paths
from fedmerge.errors import CheckpointError
from tests.unit.checkpoint.samples import save_safetensors, save_zip, state, write_index


def test_files_stay_as_they_are_given(tmp_path: Path) -> None:
    paths = [tmp_path / "b.weights", tmp_path / "a.pt"]
    for path in paths:
        path.touch()
    assert expand_paths([str(paths[0]), paths[1], paths[0]]) == [*paths, paths[0]]


def test_a_folder_gives_its_checkpoints_in_natural_order(tmp_path: Path) -> None:
    names = ["c1.pt", "c2.safetensors", "c10.pth", "c11.CKPT", "d.pth.tar", "e.t7", "f.bin"]
    for name in [*reversed(names), "notes.txt", "c1.pt.json", ".hidden.pt"]:
        (tmp_path / name).touch()
    assert [path.name for path in expand_paths([tmp_path])] == names


def test_a_glob_gives_its_matches_in_natural_order(tmp_path: Path) -> None:
    for name in ("c10.pt", "c9.pt", "d.pt"):
        (tmp_path / name).touch()
    assert [path.name for path in expand_paths([f"{tmp_path}/c*.pt"])] == ["c9.pt", "c10.pt"]


def test_a_file_with_a_globs_characters_in_its_name_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "c[1].pt").touch()
    (tmp_path / "c1.pt").touch()
    assert expand_paths([tmp_path / "c[1].pt"]) == [tmp_path / "c[1].pt"]


def test_a_hugging_face_folder_is_one_path(tmp_path: Path) -> None:
    for name in ("with_config", "with_index", "plain"):
        (tmp_path / name).mkdir()
        save_safetensors(state(), tmp_path / name / "model.safetensors")
    (tmp_path / "with_config" / "config.json").write_text("{}")
    write_index(tmp_path / "with_index", dict.fromkeys(state(), "model.safetensors"))
    folders = [tmp_path / "with_config", tmp_path / "with_index"]
    assert expand_paths(folders) == folders
    plain = tmp_path / "plain"
    assert expand_paths([plain]) == [plain / "model.safetensors"]
    assert client_names(folders) == ["with_config", "with_index"]


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    cases = {
        tmp_path: "a folder without checkpoint files",
        tmp_path / "missing.pt": "no such file",
        tmp_path / "*.pt": "no file matches",
    }
    for argument, problem in cases.items():
        with pytest.raises(CheckpointError, match=problem):
            expand_paths([argument])


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        expand_paths([tmp_path / "closed"])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.pt", "b.pth.tar", "c.1.ckpt"], ["a", "b", "c.1"]),
        (["x/m.pt", "y/m.pt", "z/m.safetensors"], ["m", "m-2", "m-3"]),
        (["x/m.pt", "y/m.pt", "m-2.pt"], ["m", "m-3", "m-2"]),
        (["m-2.pt", "x/m.pt", "y/m.pt", "z/m-2.pt"], ["m-2", "m", "m-3", "m-2-2"]),
        (["model.safetensors.index.json", "run.v2"], ["model", "run"]),
        (["a.pt", "a.pt"], ["a", "a-2"]),
    ],
)
def test_clients_are_called_by_their_stems(paths: list[str], names: list[str]) -> None:
    assert client_names([Path(path) for path in paths]) == names


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    monkeypatch.chdir(tmp_path / "site")
    save_zip(state(), Path("a.pt"))
    assert client_names([Path()]) == ["site"]
