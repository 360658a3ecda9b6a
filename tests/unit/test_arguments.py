"""Whatever is given for an argument, what is wrong with it is said in words that name it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from fedmerge import FedmergeError, UsageError
from fedmerge.errors import Defect

OPTIONS: dict[type, dict[str, Any]] = {  # and what they can't be made without
    fedmerge.MatchOptions: {},
    fedmerge.ProbeOptions: {},
    fedmerge.RetrainOptions: {},
    fedmerge.TrainSettings: {},
    fedmerge.Running: {},
    fedmerge.RetryPolicy: {},
    fedmerge.EvaluationOptions: {},
    fedmerge.Preparation: {},
    fedmerge.ReadOptions: {},
    fedmerge.ImageOptions: {"file": "x.npy"},
    fedmerge.PartitionOptions: {"clients": 2, "homogeneous": True},
    fedmerge.ModelCode: {"factory": "net.py:Net"},
}
OTHER_NAMES = {  # by which users call fields
    (fedmerge.ProbeOptions, "source"): "probe",
    (fedmerge.ProbeOptions, "count"): "probe_count",
    (fedmerge.ProbeOptions, "mean"): "probe_mean",
    (fedmerge.ProbeOptions, "std"): "probe_std",
    (fedmerge.RetryPolicy, "timeout"): "client_timeout",
}
KEYWORDS: dict[str, list[type]] = {  # further ones of a function
    "match": [fedmerge.MatchOptions],
    "frontier": [fedmerge.MatchOptions],
    "plan": [fedmerge.MatchOptions],
    "compare": [fedmerge.MatchOptions],
    "evaluate": [fedmerge.EvaluationOptions],
    "partition": [fedmerge.PartitionOptions],
    "retrain": [fedmerge.RetrainOptions, fedmerge.TrainSettings, fedmerge.Running],
}
TOLD_BY_OTHERS = {"changes", "data", "shards"}  # data of every kind: tests/unit/test_objects.py
WRONG: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "3": 3,
    "NaN": float("nan"),
    "text": "nope",
    "bytes": b"x",
    "NUL": "\0",
    "half a character": "\ud800",
    "list": [None],
    "mapping": {1: 2},
    "array": np.zeros(3),
    "scalar": torch.tensor(1.0),
    "type": int,
    "object": object(),
}


class Net(nn.Module):
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (samples, 3)."""
        answer: torch.Tensor = self.b(self.a(x).relu())
        return answer


class World:
    """Files, and how every function is called rightly."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.clients = [str(folder / name) for name in ("a.pt", "b.pt")]
        for path in self.clients:
            torch.save(Net().state_dict(), path)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 3, 20)
        np.savez(folder / "data.npz", x=x, y=y)
        self.data, self.shards = (x, y), {"a": (x, y), "b": (x, y)}
        self.file, self.folder = str(folder / "data.npz"), folder

    def calls(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        clients, merged = {"clients": self.clients}, str(self.folder / "g.pt")
        quick = {"epochs": 1, "device": "cpu"}
        return {
            "match": (fedmerge.match, clients),
            "frontier": (fedmerge.frontier, {**clients, "model": Net}),
            "plan": (fedmerge.plan, clients),
            "evaluate": (
                fedmerge.evaluate,
                {"models": self.clients, "data": self.data, "model": Net},
            ),
            "compare": (fedmerge.compare, {**clients, "data": self.data, "model": Net}),
            "retrain": (
                fedmerge.retrain,
                {**clients, "shards": self.shards, "model": Net, **quick},
            ),
            "verify": (fedmerge.verify, {"path": merged}),
            "load_model": (fedmerge.load_model, {"build": Net, "source": merged}),
            "convert": (
                fedmerge.convert,
                {"path": self.clients[0], "output": str(self.folder / "c.pt"), "force": True},
            ),
            "partition": (
                fedmerge.partition,
                {"data": self.file, "folder": str(self.folder / "parts"), "force": True}
                | {"clients": 2, "homogeneous": True},
            ),
            "write_report": (
                fedmerge.write_report,
                {"merged": merged, "output": str(self.folder / "r.html"), "force": True},
            ),
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("arguments"))
    fedmerge.match(world.clients, output=world.folder / "g.pt")
    return world


def arguments_of(name: str, function: Callable[..., Any]) -> Iterator[str]:
    own = [p for p in inspect.signature(function).parameters if p not in TOLD_BY_OTHERS]
    yield from own
    for kind in KEYWORDS.get(name, ()):
        yield from (f.name for f in fields(kind) if f.name not in own)


FUNCTIONS = (
    *("match", "frontier", "plan", "evaluate", "compare", "retrain", "verify", "load_model"),
    *("convert", "partition", "write_report"),
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_no_kind_is_refused_by_its_name(world: World, name: str) -> None:
    function, right = world.calls()[name]
    for argument in arguments_of(name, function):
        with pytest.raises(UsageError) as refused:
            function(**{**right, argument: WRONG["object"]})
        assert argument.removesuffix("s") in refused.value.problem, argument


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"frontier", "compare"}))  # as match
def test_no_wrong_argument_raises_an_error_that_is_not_ours(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.folder)
    function, right = world.calls()[name]
    refused: list[FedmergeError] = []
    for argument in arguments_of(name, function):
        for wrong in WRONG.values():
            if callable(wrong) and argument in ("prepared", "progress", "hear"):
                continue  # a function: what it raises is its own
            try:
                function(**{**right, argument: wrong})
            except FedmergeError as error:
                refused.append(error)
    assert len(refused) > 20
    assert [e.problem for e in refused if isinstance(e, Defect) or "\n" in e.problem] == []


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: str(kind.__name__))
def test_options_of_no_kind_are_refused_by_their_names(kind: type) -> None:
    for own in fields(kind):
        if own.name == "data":
            continue
        with pytest.raises(UsageError) as refused:
            kind(**{**OPTIONS[kind], own.name: WRONG["object"]})
        name = OTHER_NAMES.get((kind, own.name), own.name)
        assert refused.value.problem.startswith(f"`{name}` is object, expected ")


def test_none_is_no_value_only_where_that_is_the_default() -> None:
    assert fedmerge.MatchOptions(max_growth=None).max_growth is None
    with pytest.raises(UsageError, match=r"`seed` is None, expected a whole number from 0"):
        fedmerge.MatchOptions(seed=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`force` is None, expected True or False"):
        fedmerge.match(["a.pt", "b.pt"], force=None)  # type: ignore[arg-type]


def test_one_pattern_and_one_number_are_lists_of_one() -> None:
    assert fedmerge.MatchOptions(keep="head.*").keep == ("head.*",)  # type: ignore[arg-type]
    assert fedmerge.ProbeOptions(mean=0.5).mean == (0.5,)  # type: ignore[arg-type]


def test_long_values_are_called_by_their_types() -> None:
    with pytest.raises(UsageError, match=r"^`dtype` is ndarray, expected float64, float32"):
        fedmerge.MatchOptions(dtype=np.zeros(500))  # type: ignore[arg-type]
    with pytest.raises(
        UsageError,
        match=r"^`seed` is list, expected a whole number from 0 to 9,223,372,036,854,775,807$",
    ):
        fedmerge.MatchOptions(seed=[0.123] * 500)  # type: ignore[arg-type]
