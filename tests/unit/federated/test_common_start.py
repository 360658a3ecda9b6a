"""Averaging that goes on from one merged model: a file's, or what `match` makes of clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedmerge
from tests.unit.federated.nets import code, mlp, permuted, plan_of, samples, state_of, write_shards
from tests.unit.federated.runs import options_for

STILL = fedmerge.TrainSettings(epochs=1, learning_rate=1e-30, weight_decay=0.0)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2})


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Return a merge of two nets, wider than these."""
    clients = {"a": state_of("deep_mlp", 1), "b": state_of("deep_mlp", 2)}
    merge = fedmerge.match(clients, max_growth="none", output=tmp_path / "merged.pt")
    assert merge.growth > 1
    return tmp_path / "merged.pt"


def tensors(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=True)
    return state


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    if any(one[name].shape != other[name].shape for name in one):
        return float("inf")
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_merge_goes_on_as_it_is(method: str, merged: Path, shards: Path, tmp_path: Path) -> None:
    for training, is_same in ((STILL, True), (fedmerge.TrainSettings(epochs=2), False)):
        output = tmp_path / f"{is_same}.pt"
        options = fedmerge.RetrainOptions(method=method, rounds=1, training=training)  # type: ignore[arg-type]
        done = fedmerge.retrain([merged], shards, options, model=code("deep_mlp"), output=output)
        assert done.growth == 1  # next to its clients, which have the merge's widths
        assert (largest_difference(tensors(output), tensors(merged)) < 1e-6) == is_same


def test_fedma_still_cuts_its_clients_out_of_the_merge(merged: Path, shards: Path) -> None:
    options = fedmerge.RetrainOptions(training=STILL)
    done = fedmerge.retrain([merged], shards, options, model=code("deep_mlp"))
    assert [group.client_widths for group in done.groups] == [(6, 6), (5, 5)]


def test_clients_that_trained_apart_go_on_from_what_match_makes_of_them(tmp_path: Path) -> None:
    """Copies in other orders of units: matched, they are the same function as before."""
    plan = plan_of("mlp")
    state = state_of("mlp", 3)
    clients = {"a": state, "b": permuted(state, plan, 4)}
    shards = write_shards(tmp_path / "shards", "mlp", {"a": 1, "b": 2})
    x = torch.from_numpy(samples("mlp", 9)["x"])
    expected = mlp()
    expected.load_state_dict(dict(state))
    for init, is_same in (("matched", True), ("shared", False)):
        options = options_for(method="fedavg", rounds=1, init=init)
        done = fedmerge.retrain(clients, shards, options, model=code("mlp"))
        assert done.rounds[0].epochs == 0
        model = fedmerge.load_model(mlp, done)
        with torch.no_grad():
            assert torch.allclose(model(x), expected(x), atol=1e-5) == is_same
    assert done.growth == 1


def test_the_first_round_is_the_match_and_the_next_begins_with_it(tmp_path: Path) -> None:
    clients = {"a": state_of("deep_mlp", 1), "b": state_of("deep_mlp", 2)}
    shards = write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2})
    done = []
    for rounds in (1, 2):
        options = fedmerge.RetrainOptions(
            method="fedavg", rounds=rounds, init="matched", training=STILL
        )
        done.append(fedmerge.retrain(clients, shards, options, model=code("deep_mlp")))
    once = fedmerge.match(
        clients, model=code("deep_mlp").fed_like([torch.zeros(1, 4)]), max_growth=1, effort="fast"
    )
    for name, array in done[0].arrays.items():
        assert np.allclose(array, once.read(name), atol=1e-6)
        assert np.allclose(array, done[1].arrays[name], atol=1e-6)
    means = {n: (clients["a"][n] + clients["b"][n]) / 2 for n in clients["a"]}
    assert not np.allclose(done[0].arrays["0.weight"], means["0.weight"].numpy(), atol=1e-3)


def test_fresh_clients_train_apart_before_they_are_matched(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", "mlp", {"a": 1, "b": 2})
    found = {}
    for init in ("independent", "matched", "shared"):
        options = options_for(method="fedavg", rounds=1, init=init)
        found[init] = fedmerge.retrain([], shards, options, model=code("mlp"))
    assert found["matched"].rounds[0].losses == found["independent"].rounds[0].losses
    assert found["matched"].rounds[0].losses != found["shared"].rounds[0].losses
    assert not np.allclose(
        found["matched"].arrays["0.weight"], found["independent"].arrays["0.weight"]
    )


def test_units_can_be_compared_on_real_inputs(tmp_path: Path) -> None:
    clients = {"a": state_of("deep_mlp", 1), "b": state_of("deep_mlp", 2)}
    shards = write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2})
    np.savez(tmp_path / "inputs.npz", x=samples("deep_mlp", 5)["x"])
    found = []
    for probes in (fedmerge.ProbeOptions(), fedmerge.ProbeOptions(data=tmp_path / "inputs.npz")):
        options = options_for(method="fedavg", rounds=1, init="matched", probes=probes)
        found.append(fedmerge.retrain(clients, shards, options, model=code("deep_mlp")))
    assert not np.allclose(found[0].arrays["0.weight"], found[1].arrays["0.weight"])
    assert found[1].probes is not None
    assert found[1].probes["data"] == "inputs.npz"


def test_a_matched_start_is_for_methods_that_average() -> None:
    with pytest.raises(fedmerge.UsageError, match="`init=matched` is for methods that average"):
        fedmerge.RetrainOptions(init="matched")
    with pytest.raises(fedmerge.UsageError, match="`probe_data` is for `init=matched`"):
        options_for(method="fedavg", probes=fedmerge.ProbeOptions(data="x.npz"))
