"""Samples in every format of the table, and from functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmerge.checkpoint import in_memory
from fedmerge.errors import TrainingError, UsageError
from fedmerge.training import (
    FORMATS,
    Preparation,
    Reading,
    Shard,
    open_columns,
    read_shard,
)
from fedmerge.values import Array

A = np.array([1.5, 2.5, 3.5], np.float32)
B = np.array([4.0, 5.0, 6.0], np.float32)
Y = np.array([0, 2, 1])
TABLE = "a,b,label\n1.5,4,0\n2.5,5,2\n3.5,6,1\n"
GREY = Preparation((0.0,), (1.0,))


def numbers(shard: Shard) -> list[Array]:
    """Return all inputs as a model takes them."""
    x, _ = shard.batch(np.arange(len(shard)), "cpu")
    return [own.numpy() for own in (x if isinstance(x, tuple) else (x,))]


def write_csv(folder: Path) -> Path:
    (folder / "c1.csv").write_text(TABLE)
    return folder / "c1.csv"


def write_parquet(folder: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = arrow.table({"a": A, "b": B, "label": Y})
    pyarrow.parquet.write_table(table, folder / "c1.parquet")
    return folder / "c1.parquet"


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_columns_of_a_table_are_features(write: Callable[[Path], Path], tmp_path: Path) -> None:
    shard = read_shard(write(tmp_path))
    assert np.array_equal(numbers(shard)[0], np.stack([A, B], 1))
    assert shard.y.tolist() == Y.tolist()
    chosen = read_shard(write(tmp_path), reading=Reading(("b",), "a"))
    assert np.array_equal(numbers(chosen)[0].reshape(-1), B)
    assert np.array_equal(chosen.targets, A)
    with pytest.raises(TrainingError, match="has no 'c', only 'a', 'b', 'label'"):
        read_shard(write(tmp_path), reading=Reading(("c",)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,label\n1,2\n3\n", "line 3 has 1 values, the header 2"),
        ("a,label\nmany,2\n", "'a' holds text, expected numbers"),
        ("a,b\n1,2\n", "expected 'x' and 'y', found 'a', 'b'"),
        ("", "expected 'x' and 'y', found nothing"),
    ],
)
def test_a_table_that_says_something_else_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "c1.csv").write_text(text)
    with pytest.raises(TrainingError, match=says):
        read_shard(tmp_path / "c1.csv")


def test_arrays_have_any_names(tmp_path: Path) -> None:
    path = tmp_path / "c1.npz"
    ids, mask = np.arange(6).reshape(3, 2), np.array([[1, 1], [1, 0], [1, 1]])
    np.savez(path, ids=ids, mask=mask, target=Y)
    with pytest.raises(TrainingError, match="expected 'x' and 'y', found 'ids', 'mask', 'target'"):
        read_shard(path)
    one = read_shard(path, reading=Reading(("ids",), "target"))
    assert [own.tolist() for own in numbers(one)] == [ids.tolist()]
    both = read_shard(path, reading=Reading(("ids", "mask"), "target"))
    assert [own.tolist() for own in numbers(both)] == [ids.tolist(), mask.tolist()]
    assert both.sha256() != one.sha256()
    trained, held = both.split(0.34, seed=0)
    for own, rows in ((trained, trained.y), (held, held.y)):
        assert numbers(own)[1].tolist() == [mask[Y.tolist().index(y)].tolist() for y in rows]
    np.savez(path, ids=ids, mask=mask[:2], target=Y)
    with pytest.raises(TrainingError, match=r"inputs are \(3, 2\) and \(2, 2\)"):
        read_shard(path, reading=Reading(("ids", "mask"), "target"))


def write_pictures(folder: Path, *names: str, mode: str = "RGB") -> Path:
    for place, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for k in range(2):
            color = (place * 10, k, 7) if mode == "RGB" else place * 10 + k
            Image.new(mode, (3, 2), color).save(folder / name / f"{k}.png")
    return folder


def test_pictures_by_class(tmp_path: Path) -> None:
    shard = read_shard(write_pictures(tmp_path / "c1", "0", "2"), preparation=GREY)
    assert shard.x.shape == (4, 3, 2, 3)
    assert (shard.x[:][:, :, 0, 0]).tolist() == [[0, 0, 7], [0, 1, 7], [10, 0, 7], [10, 1, 7]]
    assert shard.y.tolist() == [0, 0, 2, 2]
    assert numbers(shard)[0].max() == pytest.approx(10 / 255)
    grey = read_shard(write_pictures(tmp_path / "c2", "1", mode="L"), preparation=GREY)
    assert grey.x.shape == (2, 1, 2, 3)


def test_named_classes_have_the_numbers_that_all_clients_agree_on(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "c1", "cat", "eel")
    with pytest.raises(TrainingError, match="has the class 'cat', expected numbers") as error:
        read_shard(folder, preparation=GREY)
    assert "`classes=cat,dog`" in error.value.hint
    for classes, expected in (("cat,dog,eel", [0, 0, 2, 2]), ("eel,cat", [1, 1, 0, 0])):
        reading = Reading(classes=tuple(classes.split(",")))
        assert read_shard(folder, preparation=GREY, reading=reading).y.tolist() == expected
    with pytest.raises(TrainingError, match="has the class 'eel', expected one of cat, dog"):
        read_shard(folder, preparation=GREY, reading=Reading(classes=("cat", "dog")))


def test_pictures_of_several_sizes_are_refused(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "c1", "0")
    Image.new("RGB", (5, 5)).save(folder / "0" / "z.png")
    with pytest.raises(TrainingError, match=r"z\.png: is \(3, 5, 5\), expected \(3, 2, 3\)"):
        read_shard(folder, preparation=GREY)
    (folder / "0" / "z.png").write_bytes(b"no picture")
    with pytest.raises(TrainingError, match=r"z\.png: no picture that can be read"):
        read_shard(folder, preparation=GREY)


def test_the_files_of_a_folder_are_one_clients(tmp_path: Path) -> None:
    (tmp_path / "c1").mkdir()
    for k in range(2):
        np.savez(
            tmp_path / "c1" / f"part-{k}.npz", x=np.full((2, 3), k, np.float32), y=np.array([k, 1])
        )
    shard = read_shard(tmp_path / "c1")
    assert shard.name == "c1"
    assert shard.y.tolist() == [0, 1, 1, 1]
    assert shard.x[:][:, 0].tolist() == [0, 0, 1, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="empty: has no samples"):
        read_shard(tmp_path / "empty")


def save_as_datasets_does(folder: Path, **columns: list[object]) -> Path:
    """Write what `Dataset.save_to_disk` writes: Arrow streams, and a list of them."""
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir()
    table = arrow.table(columns)
    files = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(files, (table.slice(0, 1), table.slice(1)), strict=True):
        with (
            arrow.OSFile(str(folder / name), "wb") as sink,
            arrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in files]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_data_set_that_datasets_saved(tmp_path: Path) -> None:
    folder = save_as_datasets_does(
        tmp_path / "c1", input_ids=[[1, 2], [3, 4], [5, 6]], label=[0, 2, 1]
    )
    shard = read_shard(folder, reading=Reading(("input_ids",)))
    assert numbers(shard)[0].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert shard.y.tolist() == [0, 2, 1]
    ragged = save_as_datasets_does(tmp_path / "c2", ids=[[1, 2], [3]], label=[0, 1])
    with pytest.raises(TrainingError, match="'ids' has lists of different lengths"):
        read_shard(ragged, reading=Reading(("ids",)))
    (folder / "state.json").write_text("{}")
    with pytest.raises(TrainingError, match="is no data set that can be read"):
        read_shard(folder, reading=Reading(("input_ids",)))


@pytest.mark.parametrize(("name", "library"), [("c1.parquet", "pyarrow"), ("c1", "PIL")])
def test_a_library_that_is_missing_is_named(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "c1":
        write_pictures(tmp_path / name, "0")
    else:
        (tmp_path / name).write_bytes(b"")
    for module in (library, f"{library}.parquet", f"{library}.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"{library} is not installed") as error:
        read_shard(tmp_path / name, preparation=GREY)
    assert error.value.hint == "pip install 'fedmerge[data]'"


LOADERS = """
import random
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset

class Own(Dataset):
    def __init__(self, noisy=False, more=False):
        self.noisy, self.more = noisy, more
    def __len__(self):
        return 6
    def __getitem__(self, k):
        x = torch.full((2,), float(k))
        if self.noisy:
            x = x + torch.rand(2) + random.random() + np.random.rand()
        return ((x, torch.tensor([k, 1])) if self.more else x), k % 3

class Named(Own):
    def __getitem__(self, k):
        return {"ids": torch.tensor([k, k]), "mask": torch.tensor([1, 0]), "labels": k % 3}

def data_set(client): return Own()
def loader(client): return DataLoader(Own(), batch_size=4, num_workers=0)
def workers(client): return DataLoader(Own(noisy=True), batch_size=4, num_workers=2)
def several(client): return DataLoader(Own(more=True), batch_size=4)
def named(client): return DataLoader(Named(), batch_size=4)
def words(client): return np.zeros((2, 3)), np.array(["a", "b"])
def nothing(client): return 5
"""


@pytest.fixture
def loaders(tmp_path: Path) -> str:
    (tmp_path / "loaders.py").write_text(LOADERS)
    return str(tmp_path / "loaders.py")


@pytest.mark.parametrize("name", ["data_set", "loader"])
def test_functions_give_data_sets_and_loaders(name: str, loaders: str) -> None:
    shard = read_shard(f"{loaders}:{name}", client="c1")
    assert numbers(shard)[0][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert shard.y.tolist() == [0, 1, 2, 0, 1, 2]


def test_functions_give_several_inputs(loaders: str) -> None:
    several = numbers(read_shard(f"{loaders}:several", client="c1"))
    assert [own.shape for own in several] == [(6, 2), (6, 2)]
    named = read_shard(f"{loaders}:named", client="c1", reading=Reading(("ids", "mask")))
    assert numbers(named)[1].tolist() == [[1, 0]] * 6
    assert named.y.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(UsageError, match="has no 'x', only 'ids', 'mask', 'labels'"):
        read_shard(f"{loaders}:named", client="c1")


def test_functions_may_name_classes(loaders: str) -> None:
    shard = read_shard(f"{loaders}:words", client="c1", reading=Reading(classes=("b", "a")))
    assert shard.y.tolist() == [1, 0]
    with pytest.raises(TrainingError, match="returns int, expected samples and targets"):
        read_shard(f"{loaders}:nothing", client="c1")


def test_every_suffix_is_read_by_a_row_of_the_table() -> None:
    assert set(FORMATS) == {".npz", ".pt", ".pth", ".safetensors", ".csv", ".parquet"}


def test_numbers_and_categories_of_a_parquet_keep_their_values(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    x = arrow.array([[[1, 255], [3, 4]]] * 3, arrow.list_(arrow.list_(arrow.uint8(), 2)))
    kinds = arrow.array(["dog", "cat", "dog"]).dictionary_encode()
    table = arrow.table({"x": x, "y": kinds})
    pyarrow.parquet.write_table(table, tmp_path / "c1.parquet")
    shard = read_shard(tmp_path / "c1.parquet", reading=Reading(classes=("cat", "dog")))
    assert shard.targets.tolist() == [1, 0, 1]
    assert shard.x[:].tolist() == [[[1, 255], [3, 4]]] * 3


def test_texts_that_come_after_numbers_in_a_table_keep_them(tmp_path: Path) -> None:
    rows = ["007,0.5,3"] * 60_000 + ["b,2,1.5"]
    (tmp_path / "d.csv").write_text("\n".join(["kind,x,y", *rows]))
    opened = open_columns(tmp_path / "d.csv")
    columns = {name: in_memory(read()) for name, read in opened.items()}
    assert columns["kind"][[0, -1]].tolist() == ["007", "b"]
    assert columns["y"][[0, -1]].tolist() == [3.0, 1.5]
    assert columns["x"].dtype == np.float32


def test_nothing_outside_a_saved_data_set_is_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "c1").mkdir()
    state = {"_data_files": [{"filename": "../other.arrow"}]}
    (tmp_path / "c1" / "state.json").write_text(json.dumps(state))
    with pytest.raises(TrainingError, match=r"names a file outside its folder: '\.\./other"):
        read_shard(tmp_path / "c1")


def test_texts_in_place_of_pictures_are_no_paths(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    outside = tmp_path / "outside.png"
    Image.new("RGB", (2, 2)).save(outside)
    table = arrow.table({"x": arrow.array([{"bytes": str(outside)}]), "y": [0]})
    pyarrow.parquet.write_table(table, tmp_path / "c1.parquet")
    with pytest.raises(TrainingError, match="no picture, but str"):
        read_shard(tmp_path / "c1.parquet", preparation=GREY)
