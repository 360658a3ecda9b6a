"""Layers that rounds matched, seen again: the merged one is the mean of its owners'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmerge import ModelCode, RetrainOptions, retrain
from fedmerge.architecture import load_checkpoint
from fedmerge.checkpoint import open_checkpoint, read_record
from fedmerge.errors import CheckpointError
from fedmerge.federated import MatchedLayer, load_layer
from fedmerge.merging import MergeRecord, record_from_json
from fedmerge.report import Seen, conv_layers, layer_columns, layer_sites
from fedmerge.values import TrainSettings
from tests.digits import images

NET = """
from torch import nn


def build():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(45, 10),
    )
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run of three clients that start apart, with its folder beside it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "net.py").write_text(NET, encoding="utf-8")
    x, y = images()
    shards = []
    for number in range(3):
        part = slice(30 * number, 30 * number + 30)
        shards.append(folder / f"{number}.npz")
        np.savez(shards[-1], x=x[part], y=y[part])
    options = RetrainOptions(training=TrainSettings(epochs=1))
    code, output = ModelCode(f"{folder / 'net.py'}:build"), folder / "g.pt"
    retrain([], shards, options, model=code, output=output, work_dir=folder / "g.pt.work")
    return output


def record_of(run: Path) -> MergeRecord:
    return record_from_json(read_record(run), source=run.name)


def owned_widths(record: MergeRecord) -> dict[str, int]:
    return {entry.name: entry.width - entry.padding for entry in record.groups}


def kept_layer(run: Path, group: str) -> MatchedLayer:
    record = record_of(run)
    kept = load_layer(run.with_name("g.pt.work"), record.plan, group, owned_widths(record))
    assert kept is not None
    return kept


def columns(run: Path, number: int) -> tuple[str, list[Seen]]:
    """Return a group, and what the global layer, the clients' and their average see."""
    record, merged = record_of(run), open_checkpoint(run)
    layer = conv_layers(record.plan)[number]
    model = load_checkpoint(ModelCode(f"{run.parent / 'net.py'}:build").build, merged)
    [site] = layer_sites(model, merged, [layer], images()[0][:1])
    return layer.group, list(layer_columns(site, kept_layer(run, layer.group), record))


@pytest.mark.parametrize("number", [0, 1])
def test_a_merged_map_is_the_mean_of_its_owners_maps(run: Path, number: int) -> None:
    group, (merged, *clients, _) = columns(run, number)
    assert len(clients) == 3
    checked = 0
    for unit, channel in merged.places[group].items():
        owners = [
            c.look.maps[group][c.places[group][unit]] for c in clients if unit in c.places[group]
        ]
        found = merged.look.maps[group][channel]
        np.testing.assert_allclose(found, np.mean(owners, axis=0), atol=1e-5)
        checked += len(owners) > 1 and np.abs(owners[0] - owners[1]).max() > 0.01
    assert checked > 0  # owners that differ: one of them alone would not do


def test_the_average_is_that_of_what_stands_at_one_place(run: Path) -> None:
    group, (_, *_, average) = columns(run, 0)
    kept = kept_layer(run, group)
    [weight] = [name for name in next(iter(kept.clients.values())) if name.endswith("weight")]
    expected = np.mean([own[weight] for own in kept.clients.values()], axis=0)
    np.testing.assert_allclose(average.look.weights[group][: len(expected)], expected, atol=1e-6)


def test_a_layer_that_is_no_convolution_is_not_kept(run: Path) -> None:
    kept = sorted(path.name for path in run.with_name("g.pt.work").glob("matched-*"))
    assert kept == ["matched-1.safetensors", "matched-2.safetensors"]


def test_a_damaged_layer_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "matched-1.safetensors").write_bytes(b"nothing")
    record = record_of(run)
    plan, widths = record.plan, owned_widths(record)
    with pytest.raises(CheckpointError, match=r"matched-1\.safetensors: is damaged"):
        load_layer(tmp_path, plan, plan.groups[0].name, widths)
    assert load_layer(tmp_path, plan, plan.groups[1].name, widths) is None
