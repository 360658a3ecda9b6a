"""Clients that fail: tried again, left out of a round, taken in again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from fedmerge.engines import ClientInfo, LocalEngine, Outcome, Task
from fedmerge.federated import ClientFailed, ClientFinished, ModelNames, evaluation_values
from fedmerge.training import array_dtypes, tied_names
from fedmerge.values import Array
from tests.unit.federated.nets import code, save_clients, state_of, write_shards
from tests.unit.federated.runs import options_for, watched_run

Spoil = Callable[[Outcome], Outcome]
PATIENT = fedmerge.RetryPolicy(retries=1)
NONE_AGAIN = fedmerge.RetryPolicy(retries=0)


def lost(outcome: Outcome) -> Outcome:
    return replace(outcome, status="lost", arrays={}, values={}, message="gone")


def not_a_number(outcome: Outcome) -> Outcome:
    return replace(outcome, arrays={n: a * np.nan for n, a in outcome.arrays.items()})


@dataclass
class Unreliable(LocalEngine):
    """An engine that spoils the outcome of some tasks: "round/client" → how, once each."""

    spoilt: dict[str, list[Spoil]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(["a", "b", "c"])

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        for outcome in super().run(tasks, timeout=timeout):
            spoil = self.spoilt.get(outcome.task, [])
            yield spoil.pop(0)(outcome) if spoil else outcome


@pytest.fixture
def clients(tmp_path: Path) -> tuple[list[Path], Path]:
    states = {name: state_of("deep_mlp", seed) for seed, name in enumerate("abc")}
    shards = write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2, "c": 3})
    return save_clients(tmp_path, states), shards


@pytest.mark.parametrize("spoil", [lost, not_a_number])
def test_a_second_try_changes_nothing(spoil: Spoil, clients: tuple[list[Path], Path]) -> None:
    options = options_for(batch_size=8)
    _, smooth, _ = watched_run(*clients, options, model=code("deep_mlp"))
    _, rough, events = watched_run(
        *clients,
        options,
        model=code("deep_mlp"),
        engine=Unreliable({"2/b": [spoil]}),
        policy=PATIENT,
    )
    for name, array in smooth[-1].federation.fixed.items():
        assert np.array_equal(array, rough[-1].federation.fixed[name])
    assert all(not entry.missing for entry in rough[-1].rounds)
    [failure] = [event for event in events if isinstance(event, ClientFailed)]
    assert (failure.round, failure.client, failure.attempt, failure.is_last) == (2, "b", 1, False)
    assert rough[-1].rounds[1].moved_down > smooth[-1].rounds[1].moved_down
    again = [e for e in events if isinstance(e, ClientFinished) and (e.round, e.client) == (2, "b")]
    assert [event.attempt for event in again] == [2]


def with_array(name: str, array: Array | None) -> Spoil:
    """Return what puts an array, or none, in the place of one that a client returned."""

    def spoil(outcome: Outcome) -> Outcome:
        arrays = {n: a for n, a in outcome.arrays.items() if n != name}
        return replace(outcome, arrays=arrays if array is None else {**arrays, name: array})

    return spoil


def with_values(**changes: Any) -> Spoil:
    """Return what changes the values that a client returned; None takes one away."""

    def spoil(outcome: Outcome) -> Outcome:
        values = {**outcome.values, **changes}
        return replace(outcome, values={n: v for n, v in values.items() if v is not ...})

    return spoil


WEIGHT = np.zeros((5, 6), np.float32)  # as the second round's '2.weight' is, unless it grew


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (with_array("2.weight", None), "returned no '2.weight': 3 tensors, expected 4 tensors"),
        (with_array("9.weight", WEIGHT), "returned '9.weight', which its model does not have"),
        (with_array("0.weight", WEIGHT), "returned '0.weight', which is frozen; expected 4 tens"),
        (
            with_array("2.weight", WEIGHT[1:]),
            "returned '2.weight' as (4, 6) of float32, expected (5",
        ),
        (with_array("2.weight", WEIGHT[0]), "returned '2.weight' as (6,) of float32, expected (5"),
        (with_array("4.bias", np.zeros(3)), "as (3,) of float64, expected (3,) of float32"),
        (with_array("4.bias", np.zeros(3, object)), "as (3,) of object, expected (3,) of float32"),
        (with_array("4.bias", np.full(3, np.inf, np.float32)), "returned NaN or Inf in 3 of 3"),
        (
            with_values(losses=...),
            "that no training gives (Object missing required field `losses`)",
        ),
        (with_values(losses=[]), "returned the losses [], expected 1 finite numbers"),
        (with_values(losses=[float("nan")]), "returned the losses [nan], expected 1 finite"),
        (with_values(losses="low"), "(Expected `array`, got `str` - at `$.losses`)"),
        (with_values(losses=[True]), "(Expected `float`, got `bool` - at `$.losses[0]`)"),
        (with_values(samples=0), "returned 0 samples"),
        (with_values(samples=2.5), "(Expected `int`, got `float` - at `$.samples`)"),
        (lambda outcome: replace(outcome, values={}), "that no training gives"),
        (lambda outcome: replace(outcome, arrays={}), "returned no '2.weight': 0 tensors"),
    ],
)
def test_what_a_client_should_not_return_is_its_failure(
    spoil: Spoil, says: str, clients: tuple[list[Path], Path]
) -> None:
    _, states, events = watched_run(
        *clients,
        options_for(matching=fedmerge.MatchOptions(max_growth=1.0)),
        model=code("deep_mlp"),
        engine=Unreliable({"2/b": [spoil, spoil], "2/c": [spoil]}),
        policy=PATIENT,
    )
    assert [dict(entry.missing) for entry in states[-1].rounds] == [{}, {"b": "app"}, {}]
    assert sorted(states[-1].rounds[1].losses) == ["a", "c"]
    failures = [event for event in events if isinstance(event, ClientFailed)]
    assert [(e.client, e.is_last) for e in failures] == [("b", False), ("c", False), ("b", True)]
    assert all(says in failure.message for failure in failures), failures[0].message


class Tied(nn.Module):
    """Two names of one weight, which some files store twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight


def test_a_tensor_that_a_file_has_twice_is_returned_once_and_counts_for_both() -> None:
    names = _model_names(Tied(), ["one.weight", "two.weight"])
    assert names.first == {"one.weight": "one.weight", "two.weight": "one.weight"}
    found = names.from_model({"one.weight": WEIGHT})
    assert {name: array is WEIGHT for name, array in found.items()} == {
        "one.weight": True,
        "two.weight": True,
    }


def _model_names(model: nn.Module, names: list[str]) -> ModelNames:
    ties = tied_names(model)
    return ModelNames({n: n for n in names}, {}, names, ties, array_dtypes(model))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "no `loss`"),
        ({"loss": "low"}, "Expected `float`, got `str`"),
        ({"loss": 1.0, "accuracy": [1.0]}, "Expected `float`, got `array`"),
    ],
)
def test_what_an_evaluation_should_not_return_is_told(values: dict[str, Any], says: str) -> None:
    with pytest.raises(fedmerge.TrainingError, match=f"returned values that none gives .*{says}"):
        evaluation_values(Outcome("t", "a", "ok", values=values))
    whole = Outcome("t", "a", "ok", values={"loss": 1, "accuracy": float("nan"), "samples": 3})
    found = evaluation_values(whole)
    assert found["loss"] == 1
    assert np.isnan(found["accuracy"])
    assert len(found) == 2


@pytest.mark.parametrize("method", ["fedma", "fedavg"])
def test_a_client_that_fails_is_left_out_of_that_round_only(
    method: str, clients: tuple[list[Path], Path]
) -> None:
    options = options_for(method=method, passes=2, rounds=3)
    _, states, events = watched_run(
        *clients,
        options,
        model=code("deep_mlp"),
        engine=Unreliable({"2/b": [not_a_number, lost]}),
        policy=PATIENT,
    )
    missing = [dict(entry.missing) for entry in states[-1].rounds]
    assert missing == [{}, {"b": "lost"}, *[{}] * (len(missing) - 2)]
    assert [sorted(entry.losses) for entry in states[-1].rounds[1:3]] == [["a", "c"], list("abc")]
    assert [e.is_last for e in events if isinstance(e, ClientFailed)] == [False, True]


class Homeless(Unreliable):
    """An engine that has no place for client b once it has lost it."""

    def clients(self) -> Sequence[ClientInfo]:
        is_lost = not any(self.spoilt.values())
        return [c for c in super().clients() if c.name != "b" or not is_lost]


def test_who_is_left_out_for_lack_of_a_place_is_told_in_every_round(
    clients: tuple[list[Path], Path],
) -> None:
    _, states, events = watched_run(
        *clients,
        options_for(method="fedavg", rounds=3),
        model=code("deep_mlp"),
        engine=Homeless({"2/b": [lost]}),
        policy=PATIENT,
    )
    assert [dict(entry.missing) for entry in states[-1].rounds] == [{}, *[{"b": "lost"}] * 2]
    failures = [event for event in events if isinstance(event, ClientFailed)]
    assert [(e.round, e.attempt, e.is_last, e.message) for e in failures] == [
        (2, 1, False, "gone"),
        (2, 1, True, "gone"),
        (3, 0, True, "cannot be placed anywhere now"),
    ]


def test_a_round_is_decided_by_those_who_are_there(clients: tuple[list[Path], Path]) -> None:
    paths, shards = clients
    options = options_for(method="fedavg", rounds=2, rate=1e-30)
    engine = Unreliable({"2/c": [lost]})
    _, states, _ = watched_run(
        paths, shards, options, model=code("deep_mlp"), engine=engine, policy=NONE_AGAIN
    )
    both = [torch.load(path, weights_only=True)["2.weight"] for path in paths]
    mean = (both[0] + both[1] + both[2]) / 3
    fixed = states[-1].federation.fixed["2.weight"]
    assert np.allclose(fixed, mean.numpy(), atol=1e-6)  # a and b trained that mean
    assert states[-1].rounds[1].bytes_up * 3 == states[-1].rounds[1].bytes_down * 2


def test_the_absent_do_not_change_a_matched_layer(clients: tuple[list[Path], Path]) -> None:
    """With c gone in the first round, the layer is the one that a and b alone give."""
    _, shards = clients
    options = options_for()
    for name in "abc":
        (shards / f"{name}.npz").rename(shards.parent / f"{name}.npz")
    two = shards.parent / "two"
    two.mkdir()
    for folder, names in ((shards, "abc"), (two, "ab")):
        for name in names:
            (folder / f"{name}.npz").write_bytes((shards.parent / f"{name}.npz").read_bytes())
    engine = Unreliable({"1/c": [lost]})
    _, with_c, _ = watched_run(
        [], shards, options, model=code("deep_mlp"), engine=engine, policy=NONE_AGAIN
    )
    _, without, _ = watched_run([], two, options, model=code("deep_mlp"))
    for name, array in without[0].federation.fixed.items():
        assert np.array_equal(array, with_c[0].federation.fixed[name])
    later = with_c[-1].federation
    assert not np.array_equal(later.fixed["4.weight"], without[-1].federation.fixed["4.weight"])
    places = with_c[0].federation.placements[2]["0"]
    assert places.width == without[0].federation.widths["0"]
    assert len(places.indices) == 6


def test_a_client_that_was_absent_gets_the_places_of_its_units(tmp_path: Path) -> None:
    """c is a permuted copy of what a and b are, so its places are known."""
    state = state_of("deep_mlp", 1)
    turned = {
        **state,
        "0.weight": state["0.weight"].flip(0),
        "0.bias": state["0.bias"].flip(0),
        "2.weight": state["2.weight"].flip(1),
    }
    shards = write_shards(tmp_path / "s", "deep_mlp", dict.fromkeys("abc", 0))
    paths = save_clients(tmp_path, {"a": state, "b": state, "c": turned})
    run, _, _ = watched_run(paths, shards, options_for(), model=code("deep_mlp"))
    exchange = run.method.exchange(run.method.start(), run.method.rounds[0], [0, 1])
    places = [p["0"].indices.tolist() for p in exchange.federation.placements]
    assert places == [list(range(6)), list(range(6)), list(range(6))[::-1]]
    placed = [model.arrays["2.weight"] for model in exchange.federation.locals]
    assert np.array_equal(placed[2], placed[0])


def test_a_wider_client_that_was_absent_keeps_all_its_units(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide = {
        "0.weight": torch.randn(7, 4), "0.bias": torch.randn(7),
        "2.weight": torch.randn(3, 7), "2.bias": torch.randn(3),
    }  # fmt: skip
    states = {"a": state_of("mlp", 0), "b": state_of("mlp", 0), "c": wide}
    shards = write_shards(tmp_path / "s", "mlp", dict.fromkeys("abc", 0))
    run, _, _ = watched_run(
        save_clients(tmp_path, states), shards, options_for(), model=code("mlp")
    )
    done = run.method.exchange(run.method.start(), run.method.rounds[0], [0, 1]).federation
    assert done.widths == {"0": 7}
    a, _, c = (placement["0"].indices for placement in done.placements)
    assert sorted(c.tolist()) == list(range(7))
    assert np.allclose(done.fixed["0.weight"][a], states["a"]["0.weight"].numpy())
    nobody = sorted(set(range(7)) - set(a.tolist()))
    assert not done.fixed["0.weight"][nobody].any()
    assert np.array_equal(done.locals[2].arrays["2.weight"][:, c], wide["2.weight"].numpy())


def test_too_few_clients_end_the_run(clients: tuple[list[Path], Path]) -> None:
    engine = Unreliable({"2/a": [lost], "2/b": [lost]})
    policy = fedmerge.RetryPolicy(retries=0, min_clients=2)
    with pytest.raises(fedmerge.TrainingError, match="1 of 3 clients delivered, 2 are needed; a"):
        watched_run(*clients, options_for(), model=code("deep_mlp"), engine=engine, policy=policy)


def test_class_proportions_are_those_of_the_clients_that_are_there(tmp_path: Path) -> None:
    state = state_of("mlp", 0)
    states = {name: {**state, "2.bias": state["2.bias"] + k} for k, name in enumerate("abc")}
    shards = write_shards(tmp_path / "s", "mlp", {"a": 1, "b": 2, "c": 3}, a=(0,), b=(0, 1), c=(2,))
    engine = Unreliable({"2/c": [lost]})
    _, rounds, _ = watched_run(
        save_clients(tmp_path, states),
        shards,
        options_for(rate=1e-30),
        model=code("mlp"),
        engine=engine,
        policy=NONE_AGAIN,
    )
    bias = rounds[-1].federation.fixed["2.bias"] - state["2.bias"].numpy()
    assert 0 < bias[0] < 0.5  # most of class 0 is a's
    assert bias[1] == pytest.approx(1, abs=1e-6)  # all of class 1 is b's
    assert bias[2] == pytest.approx(0.5, abs=1e-6)  # nobody who is there has class 2
