"""Clients that are too sure of themselves count less in the ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.merging import (
    ALIKE_COUNT,
    Answers,
    MatchOptions,
    expand_sources,
    open_clients,
    pooled_weights,
    prepare,
    probe_clients,
    same_decisions,
    verify,
    with_voices,
)
from fedmerge.probes import ProbeOptions
from fedmerge.values import silent
from tests.digits import MODEL, client, images

LOUDER = 4.0
SCALES = np.exp(np.linspace(-2, 3, 101))  # of all weights together, which decide nothing
CODE = ModelCode(MODEL, input_shapes=((1, 1, 8, 8),))

State = dict[str, Tensor]


def louder(state: State, factor: float = LOUDER) -> State:
    """Return a client that decides as another does, with scores so many times as large."""
    last = list(state)[-2:]  # weight and bias
    return {name: factor * own if name in last else own for name, own in state.items()}


def probes(source: str, folder: Path) -> ProbeOptions:
    if source == "noise":
        return ProbeOptions(source="noise")
    np.savez(folder / "probes.npz", x=images()[0][:300])
    return ProbeOptions(data=folder / "probes.npz")


def answers_to(states: list[State], folder: Path, source: str = "data", **changes: Any) -> Answers:
    options = MatchOptions(**changes)
    session = prepare(open_clients(expand_sources(states), options.reading), options, model=CODE)
    return probe_clients(session, probes(source, folder), silent)


def objective(weights: Sequence[float], scores: Sequence[Tensor], prior: float = 0.3) -> float:
    """Return what weights are to make small, by a plain loop."""
    missed = 0.0
    for row in range(len(scores[0])):
        each = [own[row].double() for own in scores]
        wanted = sum((own.softmax(0) for own in each), torch.zeros(())) / len(each)
        mean = sum((w * own for w, own in zip(weights, each, strict=True)), torch.zeros(()))
        missed -= float(wanted @ (mean / len(each)).log_softmax(0)) / len(scores[0])
    logs = np.log(weights)
    return missed + prior * float(((logs - logs.mean()) ** 2).mean())


def test_weights_are_the_best_ones() -> None:
    rng = torch.Generator().manual_seed(0)
    known, *noise = torch.randn(3, 40, 5, generator=rng)
    scores = [3 * known, 3 * known + noise[0], 20 * noise[1]]
    weights = pooled_weights(scores)
    assert max(weights) == 1.0
    assert weights[2] < 1 / ALIKE_COUNT

    def least(given: Sequence[float]) -> float:
        return min(objective(scale * np.array(given), scores) for scale in SCALES)

    found = least(weights)
    for place, factor in product(range(3), (0.8, 1.25)):
        others = list(weights)
        others[place] *= factor
        assert least(others) > found


def test_a_client_that_is_too_sure_of_itself_counts_less(tmp_path: Path) -> None:
    states = [client(1), client(2), client(3)]
    plain = answers_to(states, tmp_path)
    assert with_voices(plain) is plain
    loud = answers_to([louder(states[0]), *states[1:]], tmp_path)
    found = with_voices(loud)
    first, *others = found.session.averaging.client_weights
    assert 0 < first < min(others) / ALIKE_COUNT
    given = dict(zip(loud.session.names, (first, *others), strict=True))
    assert found.session.options.client_weight == given
    assert not torch.allclose(found.ensemble, loud.ensemble)
    kept = [same_decisions(own.ensemble, plain.ensemble) for own in (found, loud)]
    assert kept[0] > kept[1]  # nearer to what the three said before one of them shouted


@pytest.mark.parametrize("factor", [1e-6, 1.2])
def test_clients_that_say_little_or_as_much_count_alike(factor: float, tmp_path: Path) -> None:
    found = answers_to([louder(client(1), factor), client(2), client(3)], tmp_path)
    assert with_voices(found) is found


def test_scores_that_all_classes_share_count_for_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 40, 5, generator=rng)
    assert pooled_weights([one, other]) == pooled_weights([one + 100.0, other])


def test_scores_beyond_all_measure_leave_weights_finite() -> None:
    rng = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 40, 5, generator=rng)
    assert all(0 < weight <= 1 for weight in pooled_weights([one * 1e25, other]))


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("noise", {}),
        ("data", {"client_weight": {"client-1": 2.0}}),
        ("data", {"class_counts": {f"client-{k}": [1.0] * 10 for k in (1, 2, 3)}}),
    ],
)
def test_what_the_user_says_and_made_up_inputs_leave_weights_alone(
    source: str, given: dict[str, Any], tmp_path: Path
) -> None:
    states = [louder(client(1)), client(2), client(3)]
    found = answers_to(states, tmp_path, source, **given)
    assert with_voices(found) is found


def test_weights_are_recorded_verified_and_replayed(tmp_path: Path) -> None:
    files = []
    for number, state in enumerate([louder(client(1)), client(2), client(3)]):
        files.append(tmp_path / f"c{number}.pt")
        torch.save(state, files[-1])
    output, again = tmp_path / "global.pt", tmp_path / "again.pt"
    probing = probes("data", tmp_path)
    merge = match(files, model=CODE, probes=probing, output=output, effort="fast")
    weights = merge.options.client_weight
    assert weights["c0"] < min(weights["c1"], weights["c2"]) / ALIKE_COUNT
    assert verify(output, files).ok
    options = MatchOptions(effort="fast", client_weight=dict(weights))
    match(files, options, model=CODE, probes=probing, output=again)
    assert again.read_bytes() == output.read_bytes()
