"""The whole of FedMA over Flower's nodes, to the bytes of the other engines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from fedmerge.values import Array
from tests.flower import ThreadGrid, needs_flower
from tests.sites import NAMES, OPTIONS, Net, data

pytestmark = [
    needs_flower,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),  # Flower's own
]

NODES: Mapping[int, Mapping[str, Any]] = {
    70 + place: {"client": name} for place, name in enumerate(NAMES)
}


def load_data(context: Any) -> tuple[Array, Array]:
    return data(context.node_config["client"])


def grid(**options: Any) -> ThreadGrid:
    from fedmerge.flower import client_app

    app = client_app(load_data, Net, device="cpu", **options)
    return ThreadGrid(app, NODES, is_shared=False)


def fedma(**options: Any) -> Any:
    from fedmerge.flower import FedMA

    return FedMA(Net, **{**OPTIONS, **options})


def test_the_result_is_that_of_the_local_engine_bit_by_bit(tmp_path: Path) -> None:
    fedma(output=tmp_path / "flower.pt").start(grid())
    own = {name: data(name) for name in NAMES}
    fedmerge.retrain([], own, model=Net, device="cpu", output=tmp_path / "local.pt", **OPTIONS)
    for suffix in ("pt", "pt.json"):
        found, expected = (
            (tmp_path / f"{engine}.{suffix}").read_bytes() for engine in ("flower", "local")
        )
        assert found.replace(b"flower.pt", b"local.pt") == expected
    fedma(output=tmp_path / "other.pt", seed=1).start(grid())  # the negative control
    assert (tmp_path / "other.pt").read_bytes() != (tmp_path / "local.pt").read_bytes()


def test_the_global_model_may_grow_and_the_rounds_are_layers() -> None:
    retrained = fedma(max_growth=2.0).start(grid())
    assert [entry.layer for entry in retrained.rounds] == ["0", "2", "last layer"] * 2
    assert retrained.growth > 1
    assert fedmerge.load_model(Net, retrained)[0].out_features == retrained.widths["0"]


def test_a_node_that_fails_is_left_out_of_the_round(caplog: pytest.LogCaptureFixture) -> None:
    from fedmerge.flower import client_app

    def load(context: Any) -> tuple[Array, Array]:
        if context.node_config["client"] == "south":
            raise FileNotFoundError("no disk today")
        return load_data(context)

    broken = ThreadGrid(client_app(load, Net, device="cpu"), NODES, is_shared=False)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        retrained = fedma(passes=1).start(broken)
    assert {number: dict(names) for number, names in retrained.missing.items()} == {
        1: {"south": "app"},
        2: {"south": "app"},
        3: {"south": "app"},
    }
    assert "no disk today" in caplog.text


def test_a_server_names_no_code_and_no_files_of_a_site() -> None:
    """What a hostile server puts into a task is replaced by the site's own."""
    from fedmerge.engines import FlowerEngine, Task
    from fedmerge.training import LOOK, ClientWork

    given = ClientWork(
        client="north",
        builder="os:getcwd",
        shard="/etc/passwd",
        arguments={"factory": "evil.py:Net", "arguments": {"x": 1}, "aliases": {}},
        task="evil.py:task",
    )
    engine = FlowerEngine(grid())  # type: ignore[arg-type]
    [outcome] = engine.run([Task("t", "north", LOOK, {}, given.to_json())], timeout=60)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.values["samples"] == 24


@pytest.mark.parametrize("settings", [{}, {"client": "north"}, {"arguments": 3, "training": []}])
def test_a_task_that_can_not_be_read_is_said_to_be_one(settings: Any) -> None:
    from fedmerge.engines import FlowerEngine, Task
    from fedmerge.training import LOOK

    engine = FlowerEngine(grid())  # type: ignore[arg-type]
    [outcome] = engine.run([Task("t", "north", LOOK, {}, settings)], timeout=60)
    assert outcome.status == "app"
    assert "a task that this version can't read" in outcome.message


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"work_dir": tmp_path / "work", "output": tmp_path / "g.pt"}
    whole = fedma().start(grid())

    class Stop(Exception):  # noqa: N818
        pass

    made = fedma(**options)
    nodes = grid()
    seen = 0

    def push(messages: Any) -> list[str]:
        nonlocal seen
        seen += 1
        if seen > 12:
            raise Stop
        return ThreadGrid.push_messages(nodes, messages)

    nodes.push_messages = push  # type: ignore[method-assign]
    with pytest.raises(Stop):
        made.start(nodes)
    nodes.wait()
    resumed = fedma(resume=True, **options).start(grid())
    assert len(resumed.rounds) == 6
    for name, array in whole.arrays.items():
        assert np.array_equal(array, resumed.arrays[name])


class Masked(nn.Module):
    """Two inputs: numbers, and which of them count."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc2(torch.relu(self.fc1(x * mask)))
        return found


def masked(client: str) -> tuple[tuple[Array, Array], Array]:
    x, y = data(client)
    return (x, (x > -1).astype(np.float32)), y


def test_a_site_may_have_several_inputs() -> None:
    from fedmerge.flower import FedMA, client_app

    app = client_app(
        lambda context: masked(str(context.node_config["client"])), Masked, device="cpu"
    )
    nodes: Any = ThreadGrid(app, NODES, is_shared=False)
    found = FedMA(Masked, **OPTIONS).start(nodes)
    own = {name: masked(name) for name in NAMES}
    expected = fedmerge.retrain([], own, model=Masked, device="cpu", **OPTIONS)
    for name, array in expected.arrays.items():
        assert np.array_equal(array, found.arrays[name])
