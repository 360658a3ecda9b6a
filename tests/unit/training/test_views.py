"""Views of samples that the user's function draws anew in every epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedmerge.training import ClientWork, train
from fedmerge.values import Array, Place, TrainSettings

CODE = """
import random
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def build():
    return nn.Linear(2, 3)

class Views(Dataset):
    def __init__(self, noise):
        self.noise = noise
    def __len__(self):
        return 8
    def __getitem__(self, k):
        drawn = torch.rand(2) + random.random() + np.random.rand()
        return torch.full((2,), float(k)) + self.noise * drawn, k % 3

def loader(client): return DataLoader(Views(1.0), batch_size=4, num_workers=2)
def here(client): return DataLoader(Views(1.0), batch_size=4)
def plain(client): return DataLoader(Views(0.0), batch_size=4, num_workers=2)
"""


def trained(folder: Path, function: str, *, epochs: int = 3, seed: int = 1) -> Array:
    (folder / "views.py").write_text(CODE)
    work = ClientWork(
        "c1",
        "fedmerge.architecture.model_code:build",
        f"{folder / 'views.py'}:{function}",
        {"factory": f"{folder / 'views.py'}:build", "arguments": {}, "aliases": {}},
        training=TrainSettings(epochs=epochs, batch_size=100, seed=seed),
    )
    start = {"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(3, np.float32)}
    return np.asarray(train(start, replace(work).to_json(), Place()).arrays["weight"])


def test_workers_draw_the_same_views_for_a_seed(tmp_path: Path) -> None:
    for function in ("loader", "here"):
        found = trained(tmp_path, function)
        assert np.array_equal(found, trained(tmp_path, function))
        assert not np.array_equal(found, trained(tmp_path, function, seed=2))
    plain = trained(tmp_path, "plain")
    assert np.allclose(plain, trained(tmp_path, "plain", seed=2), atol=1e-5)  # one batch: no order


def test_every_epoch_has_views_of_its_own(tmp_path: Path) -> None:
    """With views kept, three epochs would follow from the first's samples; they don't."""
    from fedmerge.training import find_task, read_shard, train_model
    from fedmerge.user_code import find_object, seeded

    found = trained(tmp_path, "here")
    with seeded(1):
        shard = read_shard(f"{tmp_path / 'views.py'}:here", client="c1")
    results = []
    for own in (shard, replace(shard, draw=None)):
        model = find_object(f"{tmp_path / 'views.py'}:build", what="model")()  # type: ignore[operator]
        for parameter in model.parameters():
            parameter.data.zero_()
        settings = TrainSettings(epochs=3, batch_size=100, seed=1)
        kept = train_model(model, own, find_task("classification"), settings)
        results.append(np.asarray(kept.arrays["weight"]))
    assert np.allclose(results[0], found, atol=1e-6)
    assert not np.allclose(results[1], found, atol=1e-4)
