"""Refinement: what it finds, and what it need not do again."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fedmerge import MatchOptions, Merge, match
from fedmerge.merging import Session, Solution, by_weights
from fedmerge.values import Progress
from tests.clients import permuted

GROUPS, PASSES = 3, 10


def net(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    sizes = (5, 9, 8, 7, 3)
    parts = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*parts).state_dict()


def refined(states: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> tuple[Merge, int]:
    """Return a merge, and how often a group was matched again."""
    counted = mock.Mock(side_effect=by_weights.match_group)
    monkeypatch.setattr(by_weights, "match_group", counted)
    merge = match(states, MatchOptions(max_growth=1.0, refine=PASSES))
    monkeypatch.undo()
    return merge, sum(call.kwargs.get("outgoing", False) for call in counted.call_args_list)


def test_groups_of_copies_are_matched_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [permuted(net(0), seed)[0] for seed in range(3)]
    merge, again = refined(copies, monkeypatch)
    assert again == GROUPS
    assert [group.match_rate for group in merge.groups] == [1.0] * GROUPS


def every_group_again(session: Session, solution: Solution, progress: Progress) -> Solution:
    """Refine the long way: all groups in every pass."""
    matchings = dict(solution.matchings)
    for _ in range(session.dials.refine):
        for number, group in enumerate(session.plan.groups):
            limit = matchings[group.name].width
            matchings[group.name] = by_weights.match_group(
                session, number, matchings, limit, outgoing=True, progress=lambda share: None
            )
    return Solution(matchings, solution.limit)


@pytest.mark.parametrize("seed", range(4))
def test_groups_around_which_nothing_changed_would_be_matched_as_before(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [net(10 * seed + k) for k in range(3)]
    merge, again = refined(clients, monkeypatch)
    with mock.patch.object(by_weights, "_refined", every_group_again):
        every, all_again = refined(clients, monkeypatch)
    assert again < all_again == PASSES * GROUPS
    assert _indices(merge) == _indices(every)


def _indices(merge: Merge) -> list[dict[str, list[int]]]:
    return [{g: a.indices.tolist() for g, a in placed.items()} for placed in merge.placements]


def test_refinement_changes_what_one_pass_found() -> None:
    clients = [net(k) for k in range(3)]
    once = match(clients, MatchOptions(max_growth=1.0, refine=0))
    often = match(clients, MatchOptions(max_growth=1.0, refine=PASSES))
    assert _indices(once) != _indices(often)
