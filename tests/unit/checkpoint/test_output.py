import os
from pathlib import Path

import pytest

from fedmerge.checkpoint import OUTPUT_SUFFIXES, check_output, record_path
from fedmerge.errors import UsageError
from tests.unit.checkpoint.samples import save_safetensors, save_sharded, save_zip, state


@pytest.mark.parametrize("suffix", [*OUTPUT_SUFFIXES, ".PT"])
def test_a_new_file_in_an_existing_folder_may_be_written(tmp_path: Path, suffix: str) -> None:
    source = save_zip(state(), tmp_path / "c1.pt")
    check_output(tmp_path / f"global{suffix}", inputs=[source], force=False)


@pytest.mark.parametrize("name", ["global", "global.json", "global.onnx", "global.pt.gz"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot write a file of this kind") as caught:
        check_output(tmp_path / name, inputs=[], force=True)
    assert caught.value.exit_code == 2


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its folder does not exist"):
        check_output(tmp_path / "no" / "global.pt", inputs=[], force=True)


def test_an_existing_output_or_record_needs_force(tmp_path: Path) -> None:
    output = tmp_path / "global.pt"
    for existing in (output, record_path(output)):
        existing.touch()
        with pytest.raises(UsageError, match=f"{existing.name}: exists already"):
            check_output(output, inputs=[], force=False)
        check_output(output, inputs=[], force=True)
        existing.unlink()
    check_output(output, inputs=[], force=False)


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "global.pt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists already"):
        check_output(tmp_path / "global.pt", inputs=[], force=False)


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "global.pt").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        check_output(tmp_path / "global.pt", inputs=[], force=True)


def test_an_input_is_never_overwritten_not_even_through_links(tmp_path: Path) -> None:
    source = save_zip(state(), tmp_path / "c1.pt")
    (tmp_path / "soft.pt").symlink_to(source)
    os.link(source, tmp_path / "hard.pt")
    (tmp_path / "folder").symlink_to(tmp_path)
    names = ["c1.pt", "soft.pt", "hard.pt", "folder/c1.pt"]
    for name in names:
        with pytest.raises(UsageError, match="the output is also an input"):
            check_output(tmp_path / name, inputs=[source], force=True)
    save_zip(state(), tmp_path / "copy.pt")
    check_output(tmp_path / "copy.pt", inputs=[source], force=True)


def test_a_shard_is_an_input_too(tmp_path: Path) -> None:
    index = save_sharded(state(), tmp_path, save_safetensors)
    for source in (index, tmp_path):
        with pytest.raises(UsageError, match="the output is also an input"):
            check_output(tmp_path / "model-00001-of-00002.safetensors", inputs=[source], force=True)
