"""Splitting a data set into shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import digits
from tests.end_to_end.helpers import Cli, listing


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The digits as training and test columns, their pixels as bytes."""
    x, y = digits.images()
    pixels, cut = np.round(x * 255).astype(np.uint8), digits.TRAINED
    np.savez_compressed(
        tmp_path / "digits.npz",
        x_train=pixels[:cut],
        y_train=y[:cut],
        x_test=pixels[cut:],
        y_test=y[cut:],
        writer=np.arange(cut) // 250,
    )
    return tmp_path / "digits.npz"


def test_the_table_counts_every_class_of_every_shard(cli: Cli, data: Path) -> None:
    folder = data.parent / "shards"
    ways = ("--clients", 4, "--dirichlet", 0.5, "--seed", 1, "--normalize", "0.3,0.4")
    outcome = cli.done("partition", data, *ways, "-o", f"{folder}/")
    title, columns, *rows = outcome.out.splitlines()
    assert title == f"{folder}: 1,200 samples of {data} in 4 shards"
    assert columns.split() == ["shard", "samples", "class", "0", *map(str, range(1, 10))]
    for number, row in enumerate(rows, start=1):
        name, *cells = row.replace(",", "").split()
        shard = np.load(folder / f"client-{number}.npz")
        assert name == f"client-{number}"
        assert list(map(int, cells)) == [
            len(shard["y"]),
            *np.bincount(shard["y"], minlength=10).tolist(),
        ]
        assert shard["x"].shape[1:] == (1, 8, 8)
    assert len(rows) == 4
    assert outcome.err == (
        f"note: x_test and y_test are in no shard: evaluate on them with --data {data}\n"
    )


def test_json_has_the_class_counts_as_match_takes_them(cli: Cli, data: Path) -> None:
    folder = data.parent / "shards"
    ways = ("--clients", 2, "--homogeneous", "--normalize", "0,1", "-o", folder)
    value = cli.done("partition", data, *ways, "--json").json
    y = np.load(data)["y_train"]
    assert value["output"] == str(folder)
    assert [entry["file"] for entry in value["shards"]] == [
        str(folder / "client-1.npz"),
        str(folder / "client-2.npz"),
    ]
    assert list(value["class_counts"]) == ["client-1", "client-2"]
    assert np.array_equal(sum(map(np.array, value["class_counts"].values())), np.bincount(y))
    assert value["kept_apart"] == ["x_test", "y_test"]


def test_a_columns_values_become_shards(cli: Cli, data: Path) -> None:
    folder = data.parent / "shards"
    outcome = cli.done(
        *("partition", data, "--by", "writer", "--min-samples", 201),
        *("--normalize", "0,1", "-o", folder),
    )
    assert sorted(listing(folder)) == ["0.npz", "1.npz", "2.npz", "3.npz"]
    assert "note: left out, for too few samples: 4\n" in outcome.err


def test_many_classes_are_counted_in_one_column(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "many.npz", x=np.zeros((60, 2)), y=np.arange(60) % 30)
    way = ("--clients", 2, "--homogeneous", "-o", tmp_path / "shards")
    outcome = cli.done("partition", tmp_path / "many.npz", *way)
    assert outcome.out.splitlines()[1].split() == ["shard", "samples", "classes"]
    assert outcome.out.splitlines()[2].split() == ["client-1", "30", "30", "of", "30"]


def test_wrong_commands_write_nothing(cli: Cli, data: Path) -> None:
    before = listing(data.parent)
    folder = ("-o", data.parent / "shards")
    even = ("--clients", 2, "--homogeneous")
    refused = cli.refused
    refused("partition", data, *folder, code=2, says=["0 ways to split are given"])
    refused("partition", data, *even, "--by", "writer", *folder, code=2, says=["2 ways to split"])
    refused("partition", data, *even, *folder, code=1, says=["uint8", "--normalize MEAN,STD"])
    refused("partition", "no.npz", *even, *folder, code=1, says=["no.npz: no such file"])
    np.savez(data.parent / "objects.npz", x=np.array([{}, {}]), y=np.zeros(2, int))
    objects = data.parent / "objects.npz"
    refused("partition", objects, *even, *folder, code=4, says=["refused, it holds Python objects"])
    objects.unlink()
    assert listing(data.parent) == before


def test_existing_shards_stay_without_force(cli: Cli, data: Path) -> None:
    command = ("partition", data, "--clients", 2, "--dirichlet", 1, "--normalize", "0,1")
    folder = ("-o", data.parent / "shards")
    cli.done(*command, *folder)
    before = listing(data.parent)
    cli.refused(*command, *folder, "--seed", 7, code=2, says=["exists already", "--force"])
    assert listing(data.parent) == before
    cli.done(*command, *folder, "--seed", 7, "--force")
    assert listing(data.parent) != before
