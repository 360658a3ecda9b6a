"""Runs on data as people have them: folders, several inputs, functions that name their clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedmerge
from tests.unit.federated.nets import code, samples
from tests.unit.federated.runs import options_for

FUNCTION = """
import torch
from torch.utils.data import DataLoader, TensorDataset
CLIENTS

def load(client):
    torch.manual_seed(len(client))
    x = torch.randn(24, 4)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=5, num_workers=2)
"""


def function_of(folder: Path, clients: str = "") -> str:
    (folder / "data.py").write_text(FUNCTION.replace("CLIENTS", clients))
    return f"{folder / 'data.py'}:load"


def test_the_list_beside_a_function_names_its_clients(tmp_path: Path) -> None:
    shards = function_of(tmp_path, 'clients = ["north", "south-west"]')
    done = fedmerge.retrain([], shards, options_for(batch_size=8), model=code("mlp"))
    assert [entry.client for entry in done.shards] == ["north", "south-west"]
    assert [entry.samples for entry in done.shards] == [24, 24]
    named = fedmerge.retrain(
        [],
        function_of(tmp_path),
        options_for(batch_size=8),
        model=code("mlp"),
        client_names=["north", "south-west"],
    )
    assert all(np.array_equal(done.arrays[name], array) for name, array in named.arrays.items())
    others = fedmerge.retrain(
        [], shards, options_for(batch_size=8), model=code("mlp"), client_names=["n", "e", "w"]
    )
    assert [entry.client for entry in others.shards] == ["n", "e", "w"]


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ("", "says nothing about the clients' names"),
        ("clients = 'north'", "'clients' in .*data.py:load is 'north', expected a list of names"),
        ("clients = ['a', 5]", r"is \['a', 5\], expected a list of names"),
    ],
)
def test_clients_that_nobody_names_are_asked_for(clients: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(fedmerge.UsageError, match=says):
        fedmerge.retrain([], function_of(tmp_path, clients), options_for(), model=code("mlp"))


def test_a_folder_of_folders_is_one_client_each(tmp_path: Path) -> None:
    for place, client in enumerate(("c2", "c10")):
        for label in range(3):
            folder = tmp_path / "data" / client / str(label)
            folder.mkdir(parents=True)
            for k in range(4):
                Image.new("L", (6, 6), 20 * label + k + place).save(folder / f"{k}.png")
    from fedmerge.training import Preparation

    options = options_for(preparation=Preparation((0.5,), (0.5,)), method="fedavg", rounds=1)
    done = fedmerge.retrain([], tmp_path / "data", options, model=code("Lenet"))
    assert [entry.client for entry in done.shards] == ["c2", "c10"]
    assert [entry.class_counts for entry in done.shards] == [(4, 4, 4)] * 2
    both = [str(tmp_path / "data" / client) for client in ("c2", "c10")]
    again = fedmerge.retrain([], both, options, model=code("Lenet"))
    assert all(np.array_equal(done.arrays[name], array) for name, array in again.arrays.items())


def test_masks_reach_the_model(tmp_path: Path) -> None:
    """With all of x masked, clients learn from their labels alone, whatever x is."""
    found = {}
    for kind, mask in (("some", [1, 0, 1, 1]), ("none", [0, 0, 0, 0])):
        for scale in (1, 2):
            folder = tmp_path / f"{kind}-{scale}"
            folder.mkdir()
            for seed, name in enumerate("ab"):
                own = samples("mlp", seed)
                masks = np.tile(np.array(mask), (len(own["y"]), 1))
                np.savez(folder / f"{name}.npz", ids=scale * own["x"], mask=masks, y=own["y"])
            options = options_for(x_key="ids,mask", y_key="y", method="fedavg", rounds=1)
            done = fedmerge.retrain([], folder, options, model=code("Masked"))
            found[kind, scale] = done.arrays["two.bias"]
    assert np.array_equal(found["none", 1], found["none", 2])
    assert not np.array_equal(found["some", 1], found["some", 2])
