"""FedAvg and FedProx against plain loops, and what every method exchanges, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedmerge
from tests.unit.federated.nets import (
    CLASSES,
    SAMPLES,
    code,
    mlp,
    samples,
    save_clients,
    state_of,
    write_shards,
)
from tests.unit.federated.plain import train_plainly
from tests.unit.federated.runs import options_for, watched_run

CLOSE = 1e-5  # float32


def two_clients(folder: Path) -> tuple[list[Path], Path]:
    """Return two clients of different states, and their shards of 24 samples each."""
    states = {name: state_of("mlp", seed) for seed, name in enumerate("ab")}
    return save_clients(folder, states), write_shards(folder / "s", "mlp", {"a": 1, "b": 2})


@pytest.mark.parametrize(("method", "mu"), [("fedavg", 0.0), ("fedprox", 2.0)])
def test_rounds_are_the_loop_written_by_hand(method: str, mu: float, tmp_path: Path) -> None:
    paths, shards = two_clients(tmp_path)
    options = options_for(epochs=3, rate=0.1, method=method, rounds=3, mu=2.0)
    merged = fedmerge.retrain(paths, shards, options, model=code("mlp")).state_dict()

    states = [torch.load(path, weights_only=True) for path in paths]
    plain = {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}
    for _ in range(2):
        trained = []
        for seed in (1, 2):
            model = mlp()
            model.load_state_dict(plain)
            shard = samples("mlp", seed)
            trained.append(train_plainly(model, shard, epochs=3, rate=0.1, decay=1e-4, mu=mu))
        plain = {name: (trained[0][name] + trained[1][name]) / 2 for name in plain}
    for name, tensor in plain.items():
        assert torch.allclose(merged[name], tensor, atol=CLOSE), name


def test_the_proximal_term_changes_the_result(tmp_path: Path) -> None:
    paths, shards = two_clients(tmp_path)
    results = [
        fedmerge.retrain(
            paths,
            shards,
            options_for(epochs=3, rate=0.1, method=method, rounds=2, mu=2.0),
            model=code("mlp"),
        ).state_dict()["0.weight"]
        for method in ("fedavg", "fedprox")
    ]
    assert (results[0] - results[1]).abs().max() > 100 * CLOSE


def test_clients_count_by_their_samples(tmp_path: Path) -> None:
    paths, shards = two_clients(tmp_path)
    found = samples("mlp", 1)
    import numpy as np

    np.savez(shards / "a.npz", x=found["x"][:6], y=found["y"][:6])
    options = options_for(method="fedavg", rounds=1)
    merged = fedmerge.retrain(paths, shards, options, model=code("mlp")).state_dict()
    one, other = (torch.load(path, weights_only=True)["2.weight"] for path in paths)
    assert torch.allclose(merged["2.weight"], (6 * one + SAMPLES * other) / (6 + SAMPLES))
    weighted = options_for(
        method="fedavg", rounds=1, matching=fedmerge.MatchOptions(client_weight={"a": 3.0})
    )
    merged = fedmerge.retrain(paths, shards, weighted, model=code("mlp")).state_dict()
    assert torch.allclose(merged["2.weight"], (3 * one + other) / 4)


def test_models_of_different_widths_are_refused(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "s", "mlp", {"a": 1, "b": 2})
    wide = {
        "0.weight": torch.randn(7, 4), "0.bias": torch.randn(7),
        "2.weight": torch.randn(3, 7), "2.bias": torch.randn(3),
    }  # fmt: skip
    paths = save_clients(tmp_path, {"a": state_of("mlp", 0), "b": wide})
    with pytest.raises(fedmerge.ArchitectureError, match="b: group '0' is 7 wide, expected 5"):
        fedmerge.retrain(paths, shards, options_for(method="fedavg"), model=code("mlp"))
    result = fedmerge.retrain(paths, shards, options_for(), model=code("mlp"))
    assert result.widths["0"] >= 7


def test_an_average_exchanges_whole_models_in_every_round(tmp_path: Path) -> None:
    paths, shards = two_clients(tmp_path)
    options = options_for(method="fedavg", rounds=3)
    _, states, _ = watched_run(paths, shards, options, model=code("mlp"))
    model = 4 * ((4 * 5 + 5) + (5 * CLASSES + CLASSES))
    for entry in states[-1].rounds:
        assert (entry.bytes_up, entry.bytes_down) == (2 * model, 2 * model)
    moved = [(entry.moved_up, entry.moved_down) for entry in states[-1].rounds]
    assert moved == [(0, 0), (2 * model, 2 * model), (2 * model, 2 * model)]


def test_matching_exchanges_one_layer_per_round_and_the_assignments(tmp_path: Path) -> None:
    paths, shards = two_clients(tmp_path)
    options = options_for(matching=fedmerge.MatchOptions(max_growth="none", match_threshold=1.0))
    _, states, _ = watched_run(paths, shards, options, model=code("mlp"))
    hidden, last = states[-1].rounds
    assert hidden.widths == {"0": 10}
    assert hidden.bytes_up == 2 * 4 * (4 * 5 + 5)
    assert hidden.bytes_down == 2 * 4 * (4 * 10 + 10) + 2 * 5 * 8
    assert last.bytes_up == last.bytes_down == 2 * 4 * (10 * CLASSES + CLASSES)
    assert (hidden.moved_up, hidden.moved_down) == (0, 0)  # the clients came trained
    assert last.moved_down == 2 * 4 * (4 * 10 + 10 + 10 * CLASSES + CLASSES)
    assert last.moved_up == last.bytes_up


def test_a_shared_start_is_the_same_for_all_and_an_independent_one_is_not(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "s", "mlp", {"a": 1, "b": 2})
    for method, init, same in (
        ("fedavg", None, True),
        ("fedma", None, False),
        ("fedavg", "independent", False),
        ("fedma", "shared", True),
    ):
        options = options_for(method=method, init=init)
        run, _, _ = watched_run([], shards, options, model=code("mlp"))
        one, other = (client.read("0.weight") for client in run.start.clients)
        assert (one == other).all() == same
        assert run.method.rounds[0].epochs == 1
