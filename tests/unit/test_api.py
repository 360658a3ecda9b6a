"""The names of `fedmerge` itself: all there, typed alike, loaded when they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedmerge
from tests import digits

CODE = fedmerge.ModelCode(digits.MODEL)


def test_every_name_is_found_and_no_other() -> None:
    for name in dir(fedmerge):
        assert getattr(fedmerge, name) is not None
    assert {"match", "retrain", "Merge", "FedmergeError"} < set(dir(fedmerge))
    with pytest.raises(AttributeError, match="No fedmerge attribute merge_all"):
        _ = fedmerge.merge_all  # type: ignore[attr-defined]


def test_importing_fedmerge_loads_nothing_heavy() -> None:
    code = "import sys, fedmerge; print('torch' in sys.modules, 'numpy' in sys.modules); "
    code += "fedmerge.partition; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


def test_a_data_set_becomes_shards_models_scores_and_a_comparison(tmp_path: Path) -> None:
    clients, data = digits.save_clients(tmp_path), digits.save_test(tmp_path)
    x, y = digits.images()
    np.savez(tmp_path / "all.npz", x=x, y=y)
    split = fedmerge.PartitionOptions(clients=3, homogeneous=True)
    done = fedmerge.partition(tmp_path / "all.npz", tmp_path / "shards", split)
    assert [shard.samples for shard in done.shards] == [599, 599, 599]
    scores = fedmerge.evaluate(clients, data, model=CODE)
    compared = fedmerge.compare(clients, data, model=CODE)
    alone = [row.evaluation for row in compared.rows if row.kind == "client"]
    assert [score.evaluation.loss for score in scores] == pytest.approx(
        [found.loss for found in alone if found is not None]
    )
    best = max(scores, key=lambda score: score.evaluation.metrics["accuracy"])
    assert compared.best_client == best.model
    assert compared.samples == scores[0].evaluation.samples == len(y) - digits.TRAINED
