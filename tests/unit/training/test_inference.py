"""What models cost to run: bytes to the byte, seconds that nobody judges, and nothing changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.training import InferenceCost, Shard, ensemble_cost, inference_cost

SAMPLES = 10
FLOAT = 4  # bytes


def shard(samples: int = SAMPLES) -> Shard:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(samples, 4)).astype(np.float32), rng.integers(0, 3, samples)
    return Shard("data", x, y)


def net(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def cost(model: nn.Module, batch: int = SAMPLES) -> InferenceCost:
    return inference_cost(model, shard(), device="cpu", batch_size=batch)


def test_memory_is_that_of_parameters_and_of_what_is_held_at_once() -> None:
    found = cost(net())
    assert found.parameter_bytes == FLOAT * (6 * 4 + 6 + 3 * 6 + 3)
    assert found.activation_bytes == FLOAT * SAMPLES * (6 + 6)  # before and after the ReLU
    assert found.bytes == found.parameter_bytes + FLOAT * SAMPLES * 12
    assert found.seconds > 0


def test_a_wider_net_and_a_larger_batch_hold_more() -> None:
    assert cost(net(60)).activation_bytes == 10 * (cost(net()).activation_bytes or 0)
    assert cost(net(), batch=5).activation_bytes == FLOAT * 5 * 12
    assert cost(net().double().float().half().float()).bytes == cost(net()).bytes


def test_tied_tensors_count_once() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert cost(tied).parameter_bytes == FLOAT * 16


def test_an_ensemble_takes_the_time_and_parameters_of_all_and_the_room_of_one() -> None:
    one, two = InferenceCost(1.0, 10, 5), InferenceCost(2.5, 20, 7)
    assert ensemble_cost([one, two]) == InferenceCost(3.5, 30, 7)
    assert ensemble_cost([one, InferenceCost(1.0, 1, None)]).activation_bytes is None


class Unwatched(nn.Module):
    """Fails where its ops are watched, as compiled code may."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("not while I am watched")
        out: Tensor = self.fc(x)
        return out


def test_what_cannot_be_watched_has_parameters_only() -> None:
    found = cost(Unwatched())
    assert found.activation_bytes is None
    assert found.bytes == found.parameter_bytes == FLOAT * 15


class Counting(nn.Module):
    """Draws numbers and carries a state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.fc(x) + torch.randn(3) + self.calls
        return out


def test_measuring_changes_no_result() -> None:
    clients = {name: Counting() for name in "ab"}
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 3, 20))
    scores = fedmerge.evaluate(clients, data, model=Counting)
    rows = fedmerge.compare(clients, data, model=Counting, is_matched=False).rows
    measured = {row.model: row for row in rows if row.kind == "client"}
    assert all(row.cost is not None for row in measured.values())
    first = measured["a"].evaluation
    assert first is not None
    assert first.loss == pytest.approx(scores[0].evaluation.loss, abs=1e-6)
    ensemble = next(row for row in rows if row.kind == "ensemble")
    assert ensemble.cost is not None
    both = [measured[name].cost for name in "ab"]
    assert ensemble.cost.seconds == sum(own.seconds for own in both if own is not None)
    assert next(row for row in rows if row.kind == "mean").cost is None
