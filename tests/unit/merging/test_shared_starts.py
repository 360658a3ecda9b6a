"""Clients that began with the same weights are recognised by where their units match."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.merging import by_weights
from fedmerge.values import silent

WIDTH = 24


def net(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    return {name: value.detach() for name, value in model.state_dict().items()}


def moved(state: dict[str, Tensor], seed: int, by: float) -> dict[str, Tensor]:
    """Return a net some way from another, as training would take it."""
    generator = torch.Generator().manual_seed(seed)
    return {n: v + by * torch.randn(v.shape, generator=generator) for n, v in state.items()}


def permuted(state: dict[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    return {
        "0.weight": state["0.weight"][order],
        "0.bias": state["0.bias"][order],
        "2.weight": state["2.weight"][:, order],
        "2.bias": state["2.bias"],
    }


def test_clients_that_share_a_start_are_recognised_and_merge_to_their_average() -> None:
    start = net(0)
    clients = [moved(start, seed, 0.01) for seed in (1, 2, 3)]
    merge = fedmerge.match(clients)
    average = fedmerge.match(clients, fedmerge.MatchOptions(method="average"))
    assert merge.in_place == 1
    assert merge.shares_start
    assert merge.growth == 1
    for name in start:
        np.testing.assert_array_equal(merge.read(name), average.read(name))


def test_a_few_units_that_drifted_apart_do_not_widen_it_unless_asked_to(tmp_path: Path) -> None:
    start, stranger = net(0), net(9)
    drifted = moved(start, 2, 0.01)
    for name in ("0.weight", "0.bias"):
        drifted[name][:3] = 2 * stranger[name][:3]
    files = [tmp_path / name for name in ("a.pt", "b.pt")]
    for file, state in zip(files, (moved(start, 1, 0.01), drifted), strict=True):
        torch.save(state, file)
    merge = fedmerge.match(files, output=tmp_path / "global.pt")
    average = fedmerge.match(files, fedmerge.MatchOptions(method="average"))
    assert merge.shares_start
    assert merge.growth == 1
    for name in start:
        np.testing.assert_array_equal(merge.read(name), average.read(name))
    assert fedmerge.verify(tmp_path / "global.pt", files).ok
    asked = fedmerge.match(files, fedmerge.MatchOptions(match_threshold=0.5))
    assert asked.growth > 1


@pytest.mark.parametrize("growth", [1.0, 1.5])
def test_others_are_not(growth: float) -> None:
    order = [*range(1, WIDTH), 0]
    apart = fedmerge.match([net(0), net(1)], fedmerge.MatchOptions(max_growth=growth))
    assert apart.in_place is not None
    assert not apart.shares_start
    copies = fedmerge.match([net(0), permuted(net(0), order)])
    assert copies.in_place == 0
    assert not copies.shares_start


def test_what_was_not_compared_says_nothing() -> None:
    clients = [net(0), net(1)]
    lined_up = fedmerge.match(clients, fedmerge.MatchOptions(method="average"))
    side_by_side = fedmerge.match(clients, fedmerge.MatchOptions(method="ensemble"))
    assert lined_up.in_place is None
    assert side_by_side.in_place is None
    assert not lined_up.shares_start


@pytest.mark.parametrize(("apart", "passes"), [(True, 0), (False, 1)])
def test_where_only_a_shared_start_counts_clients_trained_apart_are_matched_once(
    apart: bool, passes: int
) -> None:
    clients = [net(0), net(1) if apart else moved(net(0), 2, 0.01)]
    session = fedmerge.api.open_session(clients, fedmerge.MatchOptions())
    with mock.patch.object(by_weights, "_refined", side_effect=by_weights._refined) as refined:
        merge = by_weights.merge_by_weights(session, silent, only_if_shared=True)
    assert refined.call_count == passes
    assert merge.shares_start is not apart
