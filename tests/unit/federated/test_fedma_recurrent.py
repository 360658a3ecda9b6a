"""Rounds of groups that feed themselves: recurrent weights are sent, so they are compared too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.engines import LocalEngine
from fedmerge.federated import fedma, open_run, prepare_run
from fedmerge.merging import match_group
from fedmerge.values import Assignment, Plan
from tests.unit.federated.nets import permuted, save_clients
from tests.unit.federated.runs import options_for

HERE = "tests.unit.federated.test_fedma_recurrent"
INPUTS, HIDDEN, STEPS, CLASSES = 4, 12, 5, 3
ALIKE = range(6, HIDDEN)  # units that input weights can't tell apart
NOISE = 1e-2  # between clients, in the input weights of these
REFINE = 3  # the default

State = Mapping[str, Tensor]


class Steps(nn.Module):
    """A recurrent layer over some steps, and a decoder of its last state."""

    def __init__(self, cell: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, cell)(INPUTS, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rnn(x)[0][:, -1])
        return logits


class Chain(nn.Module):
    """A group that nothing feeds back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.stem(x).relu())
        return logits


class Stream(Chain):
    """A layer that adds to the units that it reads: no step of time, but the same matter."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        logits: Tensor = self.out((x + self.block(x)).relu())
        return logits


NETS: Mapping[str, fedmerge.ModelCode] = {
    **{
        cell: fedmerge.ModelCode(
            f"{HERE}:Steps", {"cell": cell}, input_shapes=((2, STEPS, INPUTS),)
        )
        for cell in ("RNN", "GRU", "LSTM")
    },
    **{
        net: fedmerge.ModelCode(f"{HERE}:{net}", input_shapes=((2, INPUTS),))
        for net in ("Stream", "Chain")
    },
}
FED_BACK = ("RNN", "GRU", "LSTM", "Stream")


def is_of_inputs(name: str) -> bool:
    """Whether a tensor counts in a first comparison, biases too."""
    return name.startswith(("rnn.weight_ih", "rnn.bias", "stem"))


def state_of(net: str) -> dict[str, Tensor]:
    """Return a net in which some units have the same weights and biases of the inputs."""
    torch.manual_seed(0)
    state = dict(NETS[net].build().state_dict())
    for name, tensor in state.items():
        if is_of_inputs(name):
            by_gate = tensor.view(-1, HIDDEN, *tensor.shape[1:])
            by_gate[:, list(ALIKE)] = by_gate[:, ALIKE[0], None].clone()
    return state


def noisy(state: State, seed: int) -> dict[str, Tensor]:
    """Return the net with input weights that differ a little."""
    torch.manual_seed(seed)
    return {
        name: tensor + NOISE * torch.randn_like(tensor) if is_of_inputs(name) else tensor
        for name, tensor in state.items()
    }


def clients_of(net: str) -> dict[str, State]:
    """Return the same net three times, its units in other orders, and with some noise."""
    state, plan = state_of(net), plan_of(net)
    return {
        name: permuted(noisy(numbered(state), seed), plan, seed) for seed, name in enumerate("abc")
    }


def numbered(state: State) -> dict[str, Tensor]:
    """Return the net with a decoder whose first row is the unit's number: by it orders are told."""
    weight = state["out.weight"].clone()
    weight[0] = torch.arange(HIDDEN)
    return {**state, "out.weight": weight}


def plan_of(net: str) -> Plan:
    return fedmerge.plan([state_of(net)], model=NETS[net])


def first_round(
    folder: Path,
    net: str,
    clients: Mapping[str, State],
    present: Sequence[int] = (0, 1, 2),
    **changes: Any,
) -> tuple[list[Assignment], int]:
    """Return the assignments of the first exchange, and its bytes."""
    shards = folder / "shards"
    shards.mkdir(exist_ok=True)
    x = np.zeros((4, *NETS[net].input_shapes[0][1:]), np.float32)
    for name in clients:
        np.savez(shards / f"{name}.npz", x=x, y=np.arange(4) % CLASSES)
    options = options_for(matching=fedmerge.MatchOptions(max_growth=1, **changes))
    opened = open_run(save_clients(folder, clients), [shards], options, model=NETS[net])
    run = prepare_run(opened, LocalEngine(opened.clients))
    done = run.method.exchange(run.method.start(), run.method.rounds[0], present)
    found = [next(iter(placed.values())) for placed in done.federation.placements]
    return found, done.up + done.down


def is_matched(clients: Mapping[str, State], found: Sequence[Assignment]) -> list[bool]:
    """Return per unit of the net whether the copies of it were matched with each other."""
    places = []
    for client, assignment in zip(clients.values(), found, strict=True):
        numbers = client["out.weight"][0].long().numpy()
        places.append(assignment.indices[np.argsort(numbers)])
    return [len(set(unit)) == 1 for unit in zip(*places, strict=True)]


@pytest.mark.parametrize("net", FED_BACK)
def test_units_that_only_recurrent_weights_tell_apart_are_matched(net: str, tmp_path: Path) -> None:
    clients = clients_of(net)
    found, _ = first_round(tmp_path, net, clients)
    assert is_matched(clients, found) == [True] * HIDDEN
    by_inputs, _ = first_round(tmp_path, net, clients, refine=0)
    told = is_matched(clients, by_inputs)
    assert told[: ALIKE[0]] == [True] * ALIKE[0]
    assert not all(told[ALIKE[0] :])


@pytest.mark.parametrize("net", FED_BACK)
def test_a_client_that_was_absent_is_placed_by_its_recurrent_weights(
    net: str, tmp_path: Path
) -> None:
    clients = clients_of(net)
    found, _ = first_round(tmp_path, net, clients, present=(0, 1))
    assert is_matched(clients, found) == [True] * HIDDEN
    by_inputs, _ = first_round(tmp_path, net, clients, present=(0, 1), refine=0)
    assert not all(is_matched(clients, by_inputs))


def test_recurrent_weights_in_the_comparison_cost_no_byte(tmp_path: Path) -> None:
    clients = clients_of("LSTM")
    _, usual = first_round(tmp_path, "LSTM", clients)
    _, by_inputs = first_round(tmp_path, "LSTM", clients, refine=0)
    assert usual == by_inputs > 0


def test_only_what_the_round_exchanges_is_compared(tmp_path: Path) -> None:
    clients = clients_of("LSTM")
    found, _ = first_round(tmp_path, "LSTM", clients)
    for tensor, is_seen in (("out.weight", False), ("rnn.weight_hh_l0", True)):
        torch.manual_seed(5)
        other = {**clients["b"], tensor: torch.randn_like(clients["b"][tensor])}
        changed, _ = first_round(tmp_path, "LSTM", {**clients, "b": other})
        same = all(
            np.array_equal(one.indices, two.indices)
            for one, two in zip(found, changed, strict=True)
        )
        assert same is not is_seen


@pytest.mark.parametrize(
    ("options", "times"),
    [({}, 1 + 2), ({"refine": 1}, 1 + 1), ({"refine": 0}, 1), ({"preset": "paper"}, 1)],
)
def test_a_group_is_matched_again_until_nothing_changes(
    options: dict[str, Any], times: int, tmp_path: Path
) -> None:
    counted = mock.Mock(side_effect=match_group)
    with mock.patch.object(fedma, "match_group", counted):
        first_round(tmp_path, "GRU", clients_of("GRU"), **options)
    assert counted.call_count == times < 1 + REFINE


def test_a_group_that_does_not_feed_itself_is_matched_once(tmp_path: Path) -> None:
    counted = mock.Mock(side_effect=match_group)
    with mock.patch.object(fedma, "match_group", counted):
        first_round(tmp_path, "Chain", clients_of("Chain"))
    assert counted.call_count == 1
