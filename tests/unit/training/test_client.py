import json
import time
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.training import (
    ClientWork,
    Preparation,
    evaluate,
    evaluate_model,
    find_task,
    load_arrays,
    look,
    train,
    train_model,
)
from fedmerge.values import Place, TrainSettings
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
    assert set(result.values) == {"losses", "samples", "training_seconds"}


def own_work(path: Path | str, **changes: object) -> dict[str, object]:
    """Return the settings of work on the net as its own code builds it."""
    arguments = {
        "factory": "tests.unit.training.models:ImageNet",
        "arguments": {},
        "aliases": {},
    }
    own = replace(work(Path(path)), shard=str(path), builder=OWN, arguments=arguments)
    return replace(own, frozen=(), **changes).to_json()  # type: ignore[arg-type]


OWN = "fedmerge.architecture.model_code:build"


def test_a_client_tells_what_the_server_has_to_know_and_no_more(tmp_path: Path) -> None:
    path = write_images(tmp_path / "c1.npz", seed=2)
    before = torch.get_rng_state()
    told = look({}, own_work(path), Place())
    assert torch.equal(torch.get_rng_state(), before)
    assert told.arrays == {}
    assert told.values == {
        "samples": 50,
        "class_counts": np.bincount(images(seed=2).y).tolist(),
        "sha256": sha256(path.read_bytes()).hexdigest(),
        "shapes": [[1, 1, 6, 6]],
        "dtypes": ["float32"],
        "stored": "float32",
    }
    quiet = look({}, own_work(path, keeps_class_counts=True), Place())
    assert quiet.values == {**told.values, "class_counts": None}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"y": np.full(50, 99)}, "c1.npz: y has the class 99, but the model has 3 outputs"),
        ({"x": np.zeros((50, 2, 6, 6), np.float32)}, "c1.npz: the model fails on samples of shape"),
        ({"y": np.zeros(7, np.int64)}, "expected one target per sample"),
    ],
)
def test_data_that_do_not_fit_are_refused_with_the_reason(
    columns: dict[str, np.ndarray], says: str, tmp_path: Path
) -> None:
    path = write_images(tmp_path / "c1.npz", seed=2)
    with np.load(path) as shard:
        np.savez(path, **{**shard, **columns})
    assert says in look({}, own_work(path), Place()).values["refused"]["problem"]


def test_what_the_clients_own_code_raises_is_no_refusal(tmp_path: Path) -> None:
    code = tmp_path / "data.py"
    code.write_text("def load(client):\n    raise RuntimeError('no data today')\n")
    with pytest.raises(TrainingError, match="no data today"):
        look({}, own_work(f"{code}:load"), Place())


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
