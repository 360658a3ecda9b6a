"""Agnostic federated learning: weights by losses, their and their projection."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedmerge
from fedmerge.federated import nearest_weights
from fedmerge.values import Float64Array
from tests.unit.federated.nets import code, samples, save_clients, state_of, write_shards
from tests.unit.federated.runs import options_for, watched_run


def by_brute_force(values: Float64Array) -> Float64Array:
    """Return the nearest weights among those of all sets of clients that count at all."""
    found = []
    for size in range(1, len(values) + 1):
        for chosen in itertools.combinations(range(len(values)), size):
            own = list(chosen)
            weights = np.zeros_like(values)
            weights[own] = values[own] + (1 - values[own].sum()) / size
            if weights.min() >= 0:
                found.append(weights)
    return min(found, key=lambda weights: float(((weights - values) ** 2).sum()))


@pytest.mark.parametrize("seed", range(20))
def test_the_projection_is_that_of_brute_force(seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=5)
    assert np.allclose(nearest_weights(values), by_brute_force(values), rtol=0, atol=1e-12)


def test_weights_that_sum_to_one_stay_whatever_is_added_to_all() -> None:
    weights = np.array([0.5, 0.3, 0.2])
    assert np.allclose(nearest_weights(weights + 7), weights, rtol=0, atol=1e-12)


def two_clients(folder: Path, seeds: tuple[int, int]) -> tuple[list[Path], Path]:
    state = state_of("mlp", 0)
    shards = write_shards(folder / "s", "mlp", dict(zip("ab", seeds, strict=True)))
    return save_clients(folder, dict.fromkeys("ab", state)), shards


def test_the_client_that_is_worst_counts_more(tmp_path: Path) -> None:
    paths, shards = two_clients(tmp_path, (1, 2))
    options = options_for(method="afl", rounds=4, weight_rate=0.5)
    _, states, _ = watched_run(paths, shards, options, model=code("mlp"))
    weights = {"a": 0.5, "b": 0.5}
    assert states[0].rounds[0].client_weights == weights  # nobody trained yet
    for entry in states[-1].rounds[1:]:
        mean = sum(entry.losses.values()) / 2
        for name, loss in entry.losses.items():
            weights[name] += 0.5 * (loss - mean)
        assert entry.client_weights == pytest.approx(weights, abs=1e-9)
        worst = max(entry.losses, key=lambda name: entry.losses[name])
        assert entry.client_weights[worst] > 0.5


def test_equal_losses_keep_the_weights_of_fedavg(tmp_path: Path) -> None:
    def trained(method: Any, seeds: tuple[int, int]) -> tuple[Tensor, dict[str, float]]:
        folder = tmp_path / f"{method}{seeds[1]}"
        folder.mkdir()
        options = options_for(method=method, rounds=3, epochs=2)
        done = fedmerge.retrain(*two_clients(folder, seeds), options, model=code("mlp"))
        return done.state_dict()["0.weight"], dict(done.rounds[-1].client_weights)

    same, weights = trained("afl", (1, 1))
    assert weights == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-6)  # rows are shuffled
    assert torch.allclose(same, trained("fedavg", (1, 1))[0], rtol=0, atol=1e-6)
    apart = trained("afl", (1, 2))[0] - trained("fedavg", (1, 2))[0]
    assert apart.abs().max() > 1e-5


def test_clients_begin_as_in_fedavg_by_their_samples(tmp_path: Path) -> None:
    paths, shards = two_clients(tmp_path, (1, 2))
    found = samples("mlp", 1)
    np.savez(shards / "a.npz", x=found["x"][:6], y=found["y"][:6])
    run, _, _ = watched_run(paths, shards, options_for(method="afl", rounds=1), model=code("mlp"))
    assert run.method.start().weights == pytest.approx((0.2, 0.8))
