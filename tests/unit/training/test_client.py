import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.training import (
    ClientWork,
    Preparation,
    TrainSettings,
    evaluate,
    evaluate_model,
    find_task,
    load_arrays,
    train,
    train_model,
)
from fedmerge.values import Place
from tests.unit.training.models import (
    BUILDER,
    ImageNet,
    build,
    images,
    start_arrays,
    write_images,
)

SETTINGS = TrainSettings(epochs=2, batch_size=16, seed=4)
FROZEN = ("conv.weight", "conv.bias")


def build_slowly(shapes: Mapping[str, tuple[int, ...]], seconds: float) -> nn.Module:
    time.sleep(seconds)
    return build(shapes)


def work(path: Path) -> ClientWork:
    return ClientWork("c1", BUILDER, str(path), training=SETTINGS, frozen=FROZEN)


def test_work_survives_its_journey_through_json(tmp_path: Path) -> None:
    given = ClientWork(
        "c1",
        BUILDER,
        "c1.npz",
        arguments={"depth": 3},
        task="language-model",
        training=SETTINGS,
        frozen=FROZEN,
        preparation=Preparation((0.5,), (0.25,), channels_last=True),
    )
    assert ClientWork.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_a_client_trains_the_given_weights_on_its_shard(tmp_path: Path) -> None:
    path = write_images(tmp_path / "c1.npz", seed=2)
    result = train(start_arrays(1), work(path).to_json(), Place())
    model = ImageNet()
    load_arrays(model, start_arrays(1))
    shard = images(seed=2)
    expected = train_model(model, shard, find_task("classification"), SETTINGS, frozen=FROZEN)
    assert set(result.arrays) == set(start_arrays(1)) - set(FROZEN)
    for name, array in expected.arrays.items():
        assert np.array_equal(result.arrays[name], array)
    assert result.values["losses"] == expected.losses
    assert result.values["samples"] == 50
    assert result.values["class_counts"] == np.bincount(shard.y).tolist()


def test_the_builder_follows_the_widths_of_the_weights(tmp_path: Path) -> None:
    path = write_images(tmp_path / "c1.npz", seed=2)
    wide = {k: v.detach().numpy() for k, v in ImageNet(channels=7).state_dict().items()}
    result = train(wide, work(path).to_json(), Place())
    assert result.arrays["norm.weight"].shape == (7,)


def test_a_model_is_evaluated_where_its_data_are(tmp_path: Path) -> None:
    shard = images(seed=2)
    np.savez(tmp_path / "all.npz", x_test=shard.x[:], y_test=shard.y)
    result = evaluate_model(start_arrays(1), work(tmp_path / "all.npz").to_json(), Place())
    model = ImageNet()
    load_arrays(model, start_arrays(1))
    expected = evaluate(model, shard, find_task("classification"))
    assert result.arrays == {}
    assert result.values == {"loss": expected.loss, "samples": 50, **expected.metrics}


def test_training_ends_itself_when_its_time_is_over(tmp_path: Path) -> None:
    path = write_images(tmp_path / "c1.npz", seed=2)
    slow = ClientWork(
        "c1",
        "tests.unit.training.test_client:build_slowly",
        str(path),
        arguments={"seconds": 0.1},
        training=SETTINGS,
    )
    with pytest.raises(TrainingError, match="the time was over after 1 of 8 batches"):
        train(start_arrays(1), slow.to_json(), Place(timeout=0.05))
    assert train(start_arrays(1), slow.to_json(), Place(timeout=600)).values["samples"] == 50
