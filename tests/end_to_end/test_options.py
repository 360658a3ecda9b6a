"""What each option of `match` does to the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from fedmerge.values import Float64Array
from tests.clients import clients_of, permuted
from tests.end_to_end.helpers import (
    APART,
    TIGHT,
    Cli,
    State,
    distance,
    independent,
    load,
    mean_outputs,
    record_of,
    save,
    save_all,
)
from tests.zoo import ZOO, run


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=TIGHT)


def test_the_element_wise_average_is_the_mean_of_each_element(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    cli.done("match", *nets, "-o", tmp_path / "global.pt", "--method", "average")
    merged, states = load(tmp_path / "global.pt"), [load(path) for path in nets]
    for name, tensor in merged.items():
        assert close(tensor, torch.stack([state[name] for state in states]).mean(0))
    assert not close(merged["fc1.bias"], states[0]["fc1.bias"])


def test_client_weights_weigh_the_element_wise_average(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    options = ("--method", "average", "--set", "client_weight=a=2", "--set", "client_weight=c=0.5")
    cli.done("match", *nets, "-o", tmp_path / "global.pt", *options)
    merged, states = load(tmp_path / "global.pt"), [load(path) for path in nets]
    for name, tensor in merged.items():
        a, b, c = (state[name] for state in states)
        assert close(tensor, (2 * a + b + 0.5 * c) / 3.5)
    assert record_of(tmp_path / "global.pt")["options"]["client_weight"] == {"a": 2, "c": 0.5}


def test_client_weights_weigh_the_ensemble(tmp_path: Path, cli: Cli) -> None:
    entry = ZOO["lenet"]
    states = independent("lenet", 2)
    options = (*APART, "--set", "client_weight=a=3")
    cli.done("match", *save_all(states, tmp_path), "-o", tmp_path / "global.pt", *options)
    model = fedmerge.load_model(lambda: entry.build().double(), tmp_path / "global.pt")
    assert distance(entry, model, mean_outputs(entry, states, [3, 1])) < TIGHT
    assert distance(entry, model, mean_outputs(entry, states)) > 1e-3


def test_client_weights_do_not_enter_the_matching(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    cli.done("match", *nets, "-o", tmp_path / "one.pt")
    cli.done("match", *nets, "-o", tmp_path / "two.pt", "--set", "client_weight=b=9")
    one, two = record_of(tmp_path / "one.pt"), record_of(tmp_path / "two.pt")
    assert one["assignments"] == two["assignments"]
    assert one["tensors"] != two["tensors"]


COUNTS: dict[str, list[float]] = {
    "a": [10, 0, 3, 0],
    "b": [30, 5, 1, 0],
    "c": [0, 5, 0.5, 0],
}  # nobody has class 3


def shares(weights: list[float]) -> Float64Array:
    """Return p (clients, classes) by a plain loop."""
    table = np.zeros((3, 4))
    for label in range(4):
        total = sum(COUNTS[name][label] for name in "abc")
        for number, name in enumerate("abc"):
            share = weights[number] / sum(weights)
            table[number, label] = COUNTS[name][label] / total if total else share
    return table


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]])
def test_class_counts_average_the_last_layer_by_class(
    weights: list[float], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "counts.json").write_text(json.dumps(COUNTS))
    cli.done(
        *("match", *nets, "-o", tmp_path / "global.pt", "--method", "average"),
        *("--class-counts", tmp_path / "counts.json", "--set", f"client_weight=a={weights[0]}"),
    )
    merged, states = load(tmp_path / "global.pt"), [load(path) for path in nets]
    p = shares(weights)
    assert np.allclose(p.sum(0), 1)
    for name in ("fc2.weight", "fc2.bias"):
        layers = np.stack([state[name].numpy() for state in states])
        expected = np.einsum("jc,jc...->c...", p, layers)
        assert np.allclose(merged[name].numpy(), expected, rtol=0, atol=TIGHT)
        assert not np.allclose(merged[name].numpy(), layers.mean(0), rtol=0, atol=1e-3)
    hidden = np.stack([state["fc1.weight"].numpy() for state in states])
    expected = np.average(hidden, axis=0, weights=weights)
    assert np.allclose(merged["fc1.weight"].numpy(), expected, rtol=0, atol=TIGHT)


def test_class_counts_weigh_each_clients_own_units_where_nothing_is_matched(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "counts.json").write_text(json.dumps(COUNTS))
    options = (*APART, "--class-counts", tmp_path / "counts.json")
    cli.done("match", *nets, "-o", tmp_path / "global.pt", *options)
    merged, assigned = load(tmp_path / "global.pt"), record_of(tmp_path / "global.pt")
    p = shares([1.0, 1.0, 1.0])
    for number, path in enumerate(nets):
        own = merged["fc2.weight"][:, assigned["assignments"][path.stem]["fc1"]]
        expected = torch.from_numpy(p[number])[:, None] * load(path)["fc2.weight"]
        assert close(own, expected)


def test_keep_takes_tensors_from_the_first_client(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    cli.done("match", *nets, "-o", tmp_path / "global.pt", "--keep", "fc2.*", "--keep", "conv1.*")
    merged, states = load(tmp_path / "global.pt"), [load(path) for path in nets]
    for name in ("fc2.weight", "fc2.bias", "conv1.weight", "conv1.bias"):
        assert torch.equal(merged[name], states[0][name])
    assert not torch.equal(merged["conv2.weight"], states[0]["conv2.weight"])
    assert close(merged["fc1.bias"], torch.stack([s["fc1.bias"] for s in states]).mean(0))
    assert set(record_of(tmp_path / "global.pt")["plan"]["kept"]) == {
        *("fc2.weight", "fc2.bias", "conv1.weight", "conv1.bias")
    }
    cli.done("verify", tmp_path / "global.pt", *nets)


def test_keep_lets_clients_with_different_heads_merge(tmp_path: Path, cli: Cli) -> None:
    states = independent("mlp", 2)
    states[1]["4.weight"], states[1]["4.bias"] = torch.ones(5, 7).double(), torch.ones(5).double()
    command = ("match", *save_all(states, tmp_path), "-o", tmp_path / "global.pt")
    cli.refused(*command, code=3, says=["'4.weight'"])
    cli.done(*command, "--keep", "4.*")
    merged = load(tmp_path / "global.pt")
    assert torch.equal(merged["4.weight"], states[0]["4.weight"])
    assert close(merged["2.bias"], (states[0]["2.bias"] + states[1]["2.bias"]) / 2)


def test_flatten_says_how_many_positions_a_channel_has(tmp_path: Path, cli: Cli) -> None:
    """Images of 4 × 8 leave 2 × 6 positions, which is no square."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(60, 3)).double()
    state = dict(model.state_dict())
    order = torch.tensor([2, 4, 0, 1, 3])
    other = {
        **state,
        "0.weight": state["0.weight"][order],
        "0.bias": state["0.bias"][order],
        "3.weight": state["3.weight"].view(3, 5, 12)[:, order].reshape(3, 60),
    }
    command = ("match", *save_all([state, other], tmp_path), "-o", tmp_path / "global.pt")
    cli.refused(*command, code=3, says=["12 positions", "--set flatten"])
    cli.refused(*command, "--set", "flatten=10", code=3, says=["--set flatten=10"])
    cli.done(*command, "--set", "flatten=12")
    merged = load(tmp_path / "global.pt")
    assert all(close(merged[name], state[name]) for name in state)
    assert not close(other["3.weight"], state["3.weight"])


def test_assume_chain_merges_layers_of_equal_width(tmp_path: Path, cli: Cli) -> None:
    torch.manual_seed(0)
    shapes = {"alpha": (6, 5), "beta": (6, 6), "delta": (3, 6)}
    state = {f"{name}.weight": torch.randn(shape).double() for name, shape in shapes.items()}
    first, second = torch.randperm(6), torch.randperm(6)
    other = {
        "alpha.weight": state["alpha.weight"][first],
        "beta.weight": state["beta.weight"][second][:, first],
        "delta.weight": state["delta.weight"][:, second],
    }
    command = ("match", *save_all([state, other], tmp_path), "-o", tmp_path / "global.pt")
    cli.refused(*command, code=3, says=["--assume-chain"])
    cli.done(*command, "--assume-chain")
    merged = load(tmp_path / "global.pt")
    assert all(close(merged[name], state[name]) for name in state)


def scaled(state: State, factor: float) -> State:
    """Scale the weights, so that the paper's unit variances can tell units apart."""
    return {name: tensor * factor for name, tensor in state.items()}


@pytest.mark.parametrize("count", [2, 3])
def test_the_papers_preset_gives_the_posterior_mean_of_equal_clients(
    count: int, tmp_path: Path, cli: Cli
) -> None:
    """n members of a unit at σ = σ0 give mean · n/(n+1); the last layer is the plain mean."""
    state = scaled(dict(ZOO["lenet"].fresh(1).state_dict()), 6.0)
    copies = [state, *(permuted(state, seed)[0] for seed in range(1, count))]
    files = save_all(copies, tmp_path)
    summary = cli.done(
        "match", *files, "-o", tmp_path / "global.pt", "--set", "preset=paper", "--json"
    ).json
    assert [group["width"] for group in summary["groups"]] == [5, 6, 9]
    merged = load(tmp_path / "global.pt")
    for name, tensor in merged.items():
        factor = 1.0 if name.startswith("fc2") else count / (count + 1)
        assert close(tensor, factor * state[name]), name
    options = record_of(tmp_path / "global.pt")["options"]
    chosen = {key: options[key] for key in ("gamma", "sigma", "sigma0", "max_growth", "sweeps")}
    assert chosen == {"gamma": 7, "sigma": 1, "sigma0": 1, "max_growth": "none", "sweeps": 5}
    cli.done("verify", tmp_path / "global.pt", *files)


def test_the_papers_preset_merges_equal_lstms_back_to_the_function(
    tmp_path: Path, cli: Cli
) -> None:
    entry = ZOO["char-lstm"]
    model, states = clients_of(entry, 3)
    cli.done(
        *(
            "match",
            *save_all(states, tmp_path),
            "-o",
            tmp_path / "global.pt",
            "--set",
            "preset=paper",
        )
    )
    merged = fedmerge.load_model(lambda: entry.build().double(), tmp_path / "global.pt")
    assert distance(entry, merged, run(model, entry.inputs())) < TIGHT
    assert record_of(tmp_path / "global.pt")["options"]["gamma"] == 1e-3


def test_the_papers_preset_divides_recurrent_weights_by_all_clients(
    tmp_path: Path, cli: Cli
) -> None:
    """With a huge γ every unit is new and has one owner, its W_hh still Σ/J."""
    states = independent("lstm", 2)
    files = save_all(states, tmp_path)
    options = ("--set", "preset=paper", "--set", "gamma=1e9")
    cli.done("match", *files, "-o", tmp_path / "global.pt", *options)
    merged, record = load(tmp_path / "global.pt"), record_of(tmp_path / "global.pt")
    width = record["groups"][0]["width"]
    assert width == 12
    for name, state in zip("ab", states, strict=True):
        units = torch.tensor(record["assignments"][name]["rnn_l0"])
        rows = torch.cat([gate * width + units for gate in range(4)])
        assert close(merged["rnn.weight_ih_l0"][rows], state["rnn.weight_ih_l0"])
        assert close(merged["rnn.bias_ih_l0"][rows], state["rnn.bias_ih_l0"])
        assert close(merged["rnn.weight_hh_l0"][rows][:, units], state["rnn.weight_hh_l0"] / 2)
        assert close(merged["rnn.bias_hh_l0"][rows], state["rnn.bias_hh_l0"] / 2)
        assert close(merged["fc.weight"][:, units], state["fc.weight"] / 2)


def test_a_growth_of_one_keeps_the_widths(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    cli.done("match", *nets, "-o", tmp_path / "one.pt", "--max-growth", "1")
    cli.done("match", *nets, "-o", tmp_path / "free.pt", "--max-growth", "none")
    state = load(nets[0])
    one, free = load(tmp_path / "one.pt"), load(tmp_path / "free.pt")
    assert {name: t.shape for name, t in one.items()} == {n: t.shape for n, t in state.items()}
    assert free["fc1.bias"].shape > state["fc1.bias"].shape


@pytest.mark.parametrize("budget", [1.2, 2.0])
def test_the_size_budget_is_kept(budget: float, nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    summary = cli.done(
        "match", *nets, "-o", tmp_path / "g.pt", "--max-growth", str(budget), "--json"
    ).json
    size = sum(tensor.numel() for tensor in load(tmp_path / "g.pt").values())
    assert 1 < size / 591 <= budget
    assert summary["growth"] == pytest.approx(size / 591)


@pytest.mark.parametrize("solver", ["scipy", "lapjv"])
def test_every_solver_finds_the_same_assignment(
    solver: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    cli.done("match", *nets, "-o", tmp_path / "auto.pt")
    cli.done("match", *nets, "-o", tmp_path / "other.pt", "--set", f"solver={solver}")
    assert (tmp_path / "auto.pt").read_bytes() == (tmp_path / "other.pt").read_bytes()


# Names of clients


def test_repeated_stems_are_told_apart_by_numbers(tmp_path: Path, cli: Cli) -> None:
    states = independent("mlp", 3)
    files = [save(state, tmp_path / f"{k}" / "x.pt") for k, state in enumerate(states)]
    options = ("--method", "average", "--set", "client_weight=x-2=2")
    summary = cli.done("match", *files, "-o", tmp_path / "global.pt", *options, "--json").json
    assert summary["clients"] == ["x", "x-2", "x-3"]
    first, second, third = (state["0.bias"] for state in states)
    assert close(load(tmp_path / "global.pt")["0.bias"], (first + 2 * second + third) / 4)
    assert list(record_of(tmp_path / "global.pt")["assignments"]) == ["x", "x-2", "x-3"]
    cli.done("verify", tmp_path / "global.pt", *files)


def test_the_same_file_twice_is_merged_with_a_warning(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    files = (nets[0], nets[0].parent / ".." / "in" / "a.pt")
    outcome = cli.done("match", *files, "-o", tmp_path / "global.pt")
    assert [line for line in outcome.err.splitlines() if line.startswith("warning: ")] == [
        "warning: a-2 is the same file as a"
    ]
    assert record_of(tmp_path / "global.pt")["warnings"] == ["a-2 is the same file as a"]
    merged, state = load(tmp_path / "global.pt"), load(nets[0])
    assert all(close(merged[name], state[name]) for name in state)
    assert "warning" not in cli.done("match", *nets, "-o", tmp_path / "other.pt").err


def test_a_folder_or_a_glob_stands_for_its_files_in_natural_order(tmp_path: Path, cli: Cli) -> None:
    states = independent("mlp", 3)
    folder = tmp_path / "in"
    names = ("c2.pt", "c10.pt", "c1.pt")
    files = {name: save(state, folder / name) for name, state in zip(names, states, strict=True)}
    (folder / "notes.txt").write_text("no client")
    expected = [files[name] for name in ("c1.pt", "c2.pt", "c10.pt")]
    cli.done("match", *expected, "-o", tmp_path / "files.pt")
    cli.done("match", folder, "-o", tmp_path / "folder.pt")
    cli.done("match", folder / "c*.pt", "-o", tmp_path / "glob.pt")
    cli.done("match", folder / "c[12].pt", folder / "c10.pt", "-o", tmp_path / "both.pt")
    for name in ("folder", "glob", "both"):
        assert (tmp_path / f"{name}.pt.json").read_bytes() == (
            tmp_path / "files.pt.json"
        ).read_bytes()
    cli.refused("match", folder / "d*.pt", "-o", tmp_path / "none.pt", code=1, says=["d*.pt"])
