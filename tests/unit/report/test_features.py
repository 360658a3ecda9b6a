"""Feature maps of a merge: whose column shows what."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge import MatchOptions, ModelCode
from fedmerge.checkpoint import Checkpoint, from_state_dict
from fedmerge.merging import merge_session, prepare
from fedmerge.probes import ProbeOptions
from fedmerge.report import (
    NEGATIVE,
    UNSHARED,
    CellPicture,
    FeatureMaps,
    Look,
    Seen,
    conv_layers,
    maps_of,
    merge_columns,
)
from fedmerge.values import silent
from tests.digits import images

CODE = ModelCode(f"{__name__}:build", input_shapes=((1, 1, 8, 8),))
GROUP = "0"


def build() -> nn.Sequential:
    """Return a convolution with a head."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def clients() -> list[Checkpoint]:
    """Return three clients that share nothing but their shapes."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        found.append(from_state_dict(build().state_dict(), name=f"c{seed}"))
    return found


def columns(options: MatchOptions) -> list[Seen]:
    """Return what the merge, its clients and their average see in a digit."""
    session = prepare(clients(), options, model=CODE)
    probes = ProbeOptions(source="noise", count=40)
    merge = merge_session(session, probes, silent)
    merged = from_state_dict(merge.state_dict(), name="merged")
    layers = conv_layers(session.plan)
    return list(merge_columns(merged, merge, CODE, layers, images()[0][:1]))


@pytest.mark.parametrize(
    "options",
    [MatchOptions(lead="none"), MatchOptions(lead="c1")],
    ids=["nobody leads", "a client leads"],
)
def test_the_average_is_the_plain_mean_whatever_the_match_does(options: MatchOptions) -> None:
    average = columns(options)[-1]
    weights = [client.read("0.weight") for client in clients()]
    np.testing.assert_allclose(average.look.weights[GROUP], np.mean(weights, 0), atol=1e-6)
    assert np.abs(average.look.weights[GROUP] - weights[1]).max() > 0.1  # nor is it the leader's


def pictures(owners: list[int]) -> FeatureMaps:
    [layer] = conv_layers(prepare(clients(), MatchOptions(), model=CODE).plan)
    seen = columns(MatchOptions(max_growth=1.0, lead="none"))
    return maps_of(layer, seen, np.array(owners), CellPicture(None, "image"), how="Six of ten.")


def test_a_group_that_nobody_shares_says_so() -> None:
    assert pictures([1, 1, 1, 1]).how == f"{UNSHARED} Six of ten."
    assert pictures([1, 2, 1, 1]).how == "Six of ten."


@pytest.mark.parametrize(
    ("name", "sign", "is_said"),
    [("b", -1.0, True), ("b", 1.0, False), ("average", -1.0, False)],
    ids=["a client of the other sign", "a copy", "an average"],
)
def test_negatives_of_merged_maps_are_explained(name: str, sign: float, is_said: bool) -> None:
    [layer] = conv_layers(prepare(clients(), MatchOptions(), model=CODE).plan)
    rng = np.random.default_rng(0)
    maps, weights = rng.normal(size=(2, 6, 6)), rng.normal(size=(2, 1, 3, 3))
    places = {GROUP: {0: 0, 1: 1}}
    merged = Seen("merged", Look({GROUP: maps}, {GROUP: weights}), places)
    other = Seen(name, Look({GROUP: sign * maps}, {GROUP: sign * weights}), places)
    found = maps_of(layer, [merged, other], np.array([2, 2]), CellPicture(None, "image"))
    assert found.how == (NEGATIVE if is_said else "")
