"""Algorithm 1 and its passes against what must come out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import fedmerge
from tests.unit.federated.nets import (
    CLASSES,
    code,
    mlp,
    outputs,
    permuted,
    plan_of,
    samples,
    save_clients,
    state_of,
    write_shards,
)
from tests.unit.federated.plain import class_shares, train_plainly
from tests.unit.federated.runs import options_for, watched_run

CLOSE = 1e-5  # float32: sums of some hundred products in another order
NO_TRAINING = 1e-30  # a learning rate that changes no float32


def task_of(net: str) -> str:
    return "language-model" if "hars" in net else "classification"


@pytest.mark.parametrize("net", ["deep_mlp", "Lenet", "Residual", "Chars"])
@pytest.mark.parametrize("passes", [1, 2])
def test_permuted_copies_come_back_as_the_same_function(
    net: str, passes: int, tmp_path: Path
) -> None:
    state, plan = state_of(net, 1), plan_of(net)
    copies = {"a": state, "b": permuted(state, plan, 1), "c": permuted(state, plan, 2)}
    shards = write_shards(tmp_path / "shards", net, dict.fromkeys(copies, 0))
    options = options_for(task=task_of(net), passes=passes, rate=NO_TRAINING)
    result = fedmerge.retrain(save_clients(tmp_path, copies), shards, options, model=code(net))
    assert result.growth == 1
    merged = result.state_dict()
    assert (outputs(net, merged) - outputs(net, state)).abs().max() < CLOSE
    other = save_clients(tmp_path, {**copies, "b": state_of(net, 2)})
    spoilt = fedmerge.retrain(other, shards, options, model=code(net)).state_dict()
    assert (outputs(net, spoilt) - outputs(net, state)).abs().max() > 100 * CLOSE


def test_identical_clients_with_identical_shards_give_what_one_gives(tmp_path: Path) -> None:
    state = state_of("deep_mlp", 3)
    copies = dict.fromkeys("abc", state)
    shards = write_shards(tmp_path / "shards", "deep_mlp", dict.fromkeys(copies, 0))
    options = options_for(epochs=4, rate=0.1)
    result = fedmerge.retrain(
        save_clients(tmp_path, copies), shards, options, model=code("deep_mlp")
    )
    assert result.growth == 1
    model = torch.nn.Sequential(
        *(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5), torch.nn.ReLU()),
        torch.nn.Linear(5, CLASSES),
    )
    model.load_state_dict(state)
    shard = samples("deep_mlp", 0)
    first, second = ("0.weight", "0.bias"), ("2.weight", "2.bias")
    train_plainly(model, shard, epochs=4, rate=0.1, decay=0.0, frozen=first)
    alone = train_plainly(model, shard, epochs=12, rate=0.01, decay=1e-4, frozen=(*first, *second))
    merged = result.state_dict()
    for name, tensor in alone.items():
        assert torch.allclose(merged[name], tensor, atol=CLOSE), name
    assert not torch.allclose(merged["2.weight"], state["2.weight"], atol=100 * CLOSE)
    assert torch.equal(merged["0.weight"], state["0.weight"])


def test_one_pass_over_a_net_with_one_hidden_layer_is_the_loop_written_by_hand(
    tmp_path: Path,
) -> None:
    states = {name: state_of("mlp", seed) for seed, name in enumerate("ab")}
    shards = write_shards(tmp_path / "shards", "mlp", {"a": 1, "b": 2}, b=(0, 1))
    options = options_for(epochs=3, rate=0.1, matching=fedmerge.MatchOptions(max_growth=1))
    paths = save_clients(tmp_path, states)
    merged = fedmerge.retrain(paths, shards, options, model=code("mlp")).state_dict()

    units = [torch.cat([s["0.weight"], s["0.bias"][:, None]], 1).double() for s in states.values()]
    rows, columns = linear_sum_assignment((units[1] @ units[0].T).numpy(), maximize=True)
    order = np.argsort(columns)  # b's unit at each place of a
    assert sorted(rows) == list(range(5))
    hidden = (units[0] + units[1][order]) / 2
    trained, labels = [], []
    for name, seed in (("a", 1), ("b", 2)):
        shard = samples("mlp", seed, (0, 1) if name == "b" else range(CLASSES))
        model = mlp()
        own = torch.arange(5) if name == "a" else torch.from_numpy(order)
        model.load_state_dict(
            {
                "0.weight": hidden[:, :-1].float(),
                "0.bias": hidden[:, -1].float(),
                "2.weight": states[name]["2.weight"][:, own],
                "2.bias": states[name]["2.bias"],
            }
        )
        frozen = ("0.weight", "0.bias")
        trained.append(train_plainly(model, shard, epochs=9, rate=0.01, decay=1e-4, frozen=frozen))
        labels.append(shard["y"])
    shares = class_shares(labels, CLASSES)
    assert shares[1, 2] == 0
    weight = sum(p[:, None] * t["2.weight"] for p, t in zip(shares, trained, strict=True))
    bias = sum(p * t["2.bias"] for p, t in zip(shares, trained, strict=True))
    assert isinstance(weight, torch.Tensor)
    assert isinstance(bias, torch.Tensor)
    assert torch.allclose(merged["0.weight"].double(), hidden[:, :-1], atol=CLOSE)
    assert torch.allclose(merged["0.bias"].double(), hidden[:, -1], atol=CLOSE)
    assert torch.allclose(merged["2.weight"].double(), weight, atol=CLOSE)
    assert torch.allclose(merged["2.bias"].double(), bias, atol=CLOSE)


def test_the_last_layer_is_averaged_by_class_proportions(tmp_path: Path) -> None:
    first = state_of("mlp", 0)
    second = {**first, "2.weight": first["2.weight"] + 1, "2.bias": first["2.bias"] - 2}
    shards = write_shards(tmp_path / "shards", "mlp", {"a": 1, "b": 2}, a=(0, 2), b=(1,))
    options = options_for(rate=NO_TRAINING)
    paths = save_clients(tmp_path, {"a": first, "b": second})
    merged = fedmerge.retrain(paths, shards, options, model=code("mlp")).state_dict()
    for row, owner in ((0, first), (1, second), (2, first)):
        assert torch.allclose(merged["2.weight"][row], owner["2.weight"][row], atol=CLOSE)
        assert torch.allclose(merged["2.bias"][row], owner["2.bias"][row], atol=CLOSE)
    counts = {"a": [1, 1, 1], "b": [1, 1, 1]}
    equal = replace(options, matching=fedmerge.MatchOptions(class_counts=counts))
    mixed = fedmerge.retrain(paths, shards, equal, model=code("mlp")).state_dict()
    assert torch.allclose(mixed["2.weight"], first["2.weight"] + 0.5, atol=CLOSE)


def test_local_models_of_a_second_pass_are_the_clients_where_nothing_was_changed(
    tmp_path: Path,
) -> None:
    state, plan = state_of("Lenet", 1), plan_of("Lenet")
    copies = {"a": state, "b": permuted(state, plan, 1)}
    shards = write_shards(tmp_path / "shards", "Lenet", dict.fromkeys(copies, 0))
    run, states, _ = watched_run(
        save_clients(tmp_path, copies),
        shards,
        options_for(passes=2, rate=NO_TRAINING),
        model=code("Lenet"),
    )
    whole, before = run.method.rounds[4], states[3].federation
    assert whole.stage == "whole"
    rebuilt = run.method.begin(before, whole)
    for model, copy in zip(rebuilt.locals, copies.values(), strict=True):
        for name, tensor in copy.items():
            assert np.allclose(model.arrays[name], tensor.numpy(), atol=1e-7), name
    swapped = replace(before, placements=before.placements[::-1])
    wrong = run.method.begin(swapped, whole)
    assert not np.allclose(wrong.locals[0].arrays["conv2.weight"], state["conv2.weight"].numpy())


def test_what_is_fixed_stays_as_it_is_while_the_rest_is_trained(tmp_path: Path) -> None:
    clients = {name: state_of("Lenet", seed) for seed, name in enumerate("abc")}
    shards = write_shards(tmp_path / "shards", "Lenet", {"a": 1, "b": 2, "c": 3})
    _, states, _ = watched_run(
        save_clients(tmp_path, clients), shards, options_for(rate=0.1), model=code("Lenet")
    )
    *earlier, last = [state.federation for state in states]
    seen: set[str] = set()
    for federation in earlier:
        for name, array in federation.fixed.items():
            assert np.array_equal(array, last.fixed[name]), name
            assert all(name not in model.arrays for model in federation.locals)
        assert len(federation.fixed) == len(seen) + 2
        seen |= set(federation.fixed)
    after, before = states[1].federation.locals[0], states[0].federation.locals[0]
    assert after.arrays["fc1.bias"].shape == before.arrays["fc1.bias"].shape
    assert not np.array_equal(after.arrays["fc1.bias"], before.arrays["fc1.bias"])


def test_layers_stay_within_the_size_budget(tmp_path: Path) -> None:
    clients = {name: state_of("Lenet", seed) for seed, name in enumerate("abc")}
    shards = write_shards(tmp_path / "shards", "Lenet", {"a": 1, "b": 2, "c": 3})
    paths = save_clients(tmp_path, clients)
    for growth in (1, 1.3, 1.8):
        matching = fedmerge.MatchOptions(max_growth=growth, match_threshold=0.9)
        options = options_for(matching=matching)
        result = fedmerge.retrain(paths, shards, options, model=code("Lenet"))
        assert growth - 0.25 < result.growth <= growth
    free = options_for(matching=fedmerge.MatchOptions(max_growth="none", match_threshold=1.0))
    result = fedmerge.retrain(paths, shards, free, model=code("Lenet"))
    assert result.widths == {"conv1": 12, "conv2": 15, "fc1": 18}


def test_recurrent_layers_of_one_stack_end_equally_wide(tmp_path: Path) -> None:
    clients = {name: state_of("Chars", seed) for seed, name in enumerate("ab")}
    shards = write_shards(tmp_path / "shards", "Chars", {"a": 1, "b": 2})
    matching = fedmerge.MatchOptions(max_growth="none", match_threshold=0.3)
    options = options_for(task="language-model", passes=2, matching=matching)
    run, states, _ = watched_run(
        save_clients(tmp_path, clients), shards, options, model=code("Chars")
    )
    [(first, second)] = run.session.plan.same_width
    found = states[-1].federation.widths
    assert found[first] != found[second]  # else there is nothing to pad
    result = fedmerge.retrain(save_clients(tmp_path, clients), shards, options, model=code("Chars"))
    assert result.widths[first] == result.widths[second] == max(found[first], found[second])
    paddings = {entry.name: entry.padding for entry in result.groups}
    assert sorted((paddings[first], paddings[second])) == [0, abs(found[first] - found[second])]
    assert outputs("Chars", result.state_dict()).isfinite().all()


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    clients = {name: state_of("tied_chars", seed) for seed, name in enumerate("ab")}
    shards = write_shards(tmp_path / "shards", "tied_chars", {"a": 1, "b": 2})
    options = options_for(task="language-model", rate=0.5)
    result = fedmerge.retrain(
        save_clients(tmp_path, clients), shards, options, model=code("tied_chars")
    )
    merged = result.state_dict()
    assert torch.equal(merged["out.weight"], merged["embed.weight"])
    layers = [entry.layer for entry in result.rounds]
    assert layers == ["embed", "rnn_l0", "rnn", "last layer"]


def test_kept_tensors_are_the_first_clients_and_never_trained(tmp_path: Path) -> None:
    clients = {name: state_of("deep_mlp", seed) for seed, name in enumerate("ab")}
    shards = write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2})
    options = options_for(rate=0.5, matching=fedmerge.MatchOptions(keep=("0.*",)))
    result = fedmerge.retrain(
        save_clients(tmp_path, clients), shards, options, model=code("deep_mlp")
    )
    merged = result.state_dict()
    assert torch.equal(merged["0.weight"], clients["a"]["0.weight"])
    assert not torch.equal(merged["4.weight"], clients["a"]["4.weight"])
