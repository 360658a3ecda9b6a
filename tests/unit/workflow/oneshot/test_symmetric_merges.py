"""Merges of clients whose signs and bases differ, through the public interface."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge.types.progress import silent
from fedmerge.workflow.match import match
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.oneshot.probes import ProbeMaker
from fedmerge.workflow.oneshot.scene import Scene
from fedmerge.workflow.oneshot.symmetries.rewritten import Rewritten, settled, stored
from fedmerge.workflow.oneshot.symmetries.scene import AlikeScene, made_alike
from fedmerge.workflow.options import MatchOptions
from tests.unit.workflow.oneshot.symmetric_nets import (
    SAME,
    State,
    answers,
    code,
    difference,
    disguised,
    fresh,
    inputs_of,
    prepared_of,
)

PROBES = ProbeOptions("noise", count=60)
COPIES = [
    *("mlp", "lstm, 2 layers, both directions", "gru, 2 layers", "rnn cell", "language model"),
    *("tied language model", "lstm from learned states"),
]


def merged(states: list[State], name: str, **options: Any) -> Merge:
    return match(states, MatchOptions(**options), model=code(name), probes=PROBES)


@pytest.mark.parametrize("units", ["mean", "fit"])
@pytest.mark.parametrize("name", COPIES)
def test_disguised_copies_merge_back_to_the_function(
    name: str, units: Literal["mean", "fit"]
) -> None:
    state = fresh(name, 1)
    states = [state, disguised(name, state, 5), disguised(name, state, 6)]
    before = answers(name, state)
    assert difference(before, answers(name, states[1])) < SAME
    options: dict[str, Any] = {"max_growth": 1, "merge_units": units, "lead": "none"}
    merge = merged(states, name, **options)
    assert merge.growth == 1
    assert difference(before, answers(name, merge.state_dict())) < 10 * SAME
    plain = merged(states, name, **options, symmetries=False)
    assert difference(before, answers(name, plain.state_dict())) > 1e-2


@pytest.mark.parametrize("lead", ["none", "client-2"])
def test_what_is_written_does_not_depend_on_rewritten_clients(lead: str) -> None:
    name = "language model"
    states = [fresh(name, seed) for seed in (1, 2)]
    merge = merged(states, name, merge_units="mean", lead=lead)
    assert not any(isinstance(client, Rewritten) for client in merge.aligned)
    assert {"encoder.weight", "rnn.weight_hh_l0", "decoder.weight"} <= set(merge.fitted)
    assert "decoder.bias" not in merge.fitted  # no sign and no basis is in it
    for number, state in enumerate(states):
        placed = merge.placed_client(number)
        resized = Models(prepared_of(name, states), code(name), "cpu").merged(
            {key: tensor.numpy() for key, tensor in placed.items()}
        )
        assert difference(answers(name, state), resized(*inputs_of(name)).detach()) < SAME


def scene_of(name: str, states: list[State], **options: Any) -> Scene:
    chosen = MatchOptions(**options)
    models = Models(prepared_of(name, states, **options), code(name), "cpu")
    return Scene.on(models, chosen, ProbeMaker(models, PROBES, 0).probes(silent))


def test_the_plain_average_is_that_of_the_clients_as_they_are() -> None:
    name = "language model"
    states = [fresh(name, seed) for seed in (1, 2)]
    alike = made_alike(scene_of(name, states))
    assert isinstance(alike, AlikeScene)
    first = next(iter(alike.candidates(silent)))
    assert first.name == "element-wise average"
    average = (states[0]["encoder.weight"] + states[1]["encoder.weight"]) / 2
    np.testing.assert_allclose(first.merge.read("encoder.weight"), average, atol=1e-6)


def test_clients_stay_as_they_are_where_symmetries_are_of_no_use() -> None:
    states = [fresh("lenet", seed) for seed in (1, 2)]
    plain = scene_of("lenet", states)
    assert made_alike(plain) is plain
    by_weights = scene_of("mlp", [fresh("mlp", 1), fresh("mlp", 2)], signature="weights")
    assert made_alike(by_weights) is by_weights
    same = scene_of("mlp", [fresh("mlp", 1)] * 2)
    assert made_alike(same) is same  # no sign differs


def test_a_merge_settles_on_the_clients_it_is_of() -> None:
    scene = made_alike(scene_of("mlp", [fresh("mlp", 1), fresh("mlp", 2)]))
    rewritten = scene.matched(1.0, silent)
    settled_one = settled(rewritten, [stored(client) for client in rewritten.aligned])
    assert set(settled_one.fitted) == {"2.weight", "2.bias", "4.weight"}
    for name in rewritten.plan.tensors:
        np.testing.assert_array_equal(settled_one.read(name), rewritten.read(name))


@pytest.mark.parametrize("growth", [1.0, 1.5])
def test_clients_of_different_widths_are_merged(growth: float) -> None:
    torch.manual_seed(0)
    states = []
    for width in (6, 8):
        net = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3)
        )
        states.append(dict(net.state_dict()))
    merge = merged(states, "mlp", max_growth=growth)
    assert merge.growth <= growth
    assert merge.quality is not None


def test_a_diverged_client_is_merged_too() -> None:
    name = "language model"
    states = [fresh(name, seed) for seed in (1, 2, 3)]
    states[2] = {key: 1e12 * tensor for key, tensor in states[2].items()}
    assert merged(states, name).quality is not None
