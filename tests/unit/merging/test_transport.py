"""Optimal-transport fusion against plain loops, on permuted copies, and replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge import MatchOptions, UsageError, match, verify
from fedmerge.merging import coupling
from fedmerge.values import Float64Array
from tests.clients import clients_of, loaded, permuted
from tests.zoo import ZOO, run

SHARP = 1e-3  # a regularisation at which copies couple with nobody else
TIGHT = 1e-9
SMALL = MatchOptions(method="ot", regularisation=0.2)


def net(seed: int, hidden: tuple[int, int] = (6, 5)) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    one, two = hidden
    layers = [nn.Linear(4, one), nn.ReLU(), nn.Linear(one, two), nn.ReLU(), nn.Linear(two, 3)]
    return nn.Sequential(*layers).double().state_dict()


def plain_coupling(costs: Float64Array, epsilon: float) -> Float64Array:
    """Return Sinkhorn's coupling by multiplication, which large costs would let underflow."""
    kernel = np.exp(-costs / costs.mean() / epsilon)
    rows, columns = (np.full(size, 1 / size) for size in costs.shape)
    scale = np.ones_like(columns)
    for _ in range(20_000):
        scale = columns / (kernel.T @ (rows / (kernel @ scale)))
    return np.asarray((rows / (kernel @ scale))[:, None] * kernel * scale)


def plain_fusion(client: dict[str, Tensor], onto: dict[str, Tensor]) -> dict[str, Float64Array]:
    """Return a client's tensors in the other's order, unit by unit, as the paper has it."""
    found = {name: tensor.numpy() for name, tensor in client.items()}
    goal = {name: tensor.numpy() for name, tensor in onto.items()}
    for layer, following in (("0", "2"), ("2", "4")):
        ours = np.c_[found[f"{layer}.weight"], found[f"{layer}.bias"]]
        theirs = np.c_[goal[f"{layer}.weight"], goal[f"{layer}.bias"]]
        m, n = len(ours), len(theirs)
        costs = np.array([[sum((a - b) ** 2) for b in theirs] for a in ours])
        plan = plain_coupling(costs, 0.2)
        for name in (f"{layer}.weight", f"{layer}.bias"):
            old = found[name]
            found[name] = np.array(
                [sum(n * plan[i, j] * old[i] for i in range(m)) for j in range(n)]
            )
        reads = found[f"{following}.weight"]
        columns = [sum(m * plan[i, j] * reads[:, i] for i in range(m)) for j in range(n)]
        found[f"{following}.weight"] = np.stack(columns, axis=1)
    return found


@pytest.mark.parametrize("narrow", [(6, 5), (4, 3)])
def test_the_merge_is_the_paper_s_written_as_loops(narrow: tuple[int, int]) -> None:
    states = [net(1), net(2, narrow)]
    moved = plain_fusion(states[1], states[0])
    merged = match(states, SMALL).state_dict()
    for name, own in states[0].items():
        assert np.allclose(merged[name], (own.numpy() + moved[name]) / 2, rtol=0, atol=1e-6), name


def test_units_go_to_the_first_of_the_widest_clients() -> None:
    states = [net(1, (4, 3)), net(2), net(3)]
    moved = [plain_fusion(state, states[1]) for state in states]
    moved[1] = {name: tensor.numpy() for name, tensor in states[1].items()}
    merge = match(states, SMALL)
    assert merge.widths == {"0": 6, "2": 5}
    assert merge.growth == 1
    merged = merge.state_dict()["2.weight"]
    mean = sum(own["2.weight"] for own in moved) / 3
    assert np.allclose(merged, mean, rtol=0, atol=1e-6)


def test_clients_count_by_their_weights() -> None:
    states = [net(1), net(2)]
    moved = plain_fusion(states[1], states[0])["4.weight"]
    weighted = MatchOptions(method="ot", regularisation=0.2, client_weight={"client-1": 3})
    merged = match(states, weighted).state_dict()["4.weight"]
    assert np.allclose(merged, (3 * states[0]["4.weight"].numpy() + moved) / 4, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(ZOO))
def test_permuted_copies_merge_back_to_the_function(name: str) -> None:
    entry = ZOO[name]
    model, states = clients_of(entry, 3)
    expected = run(model, entry.inputs())

    def error(options: MatchOptions) -> float:
        merged = loaded(entry, match(states, options).state_dict())
        return float((run(merged, entry.inputs()) - expected).abs().max())

    assert error(MatchOptions(method="ot", regularisation=SHARP)) < TIGHT
    assert error(MatchOptions(method="average")) > 1e-3


def test_a_soft_coupling_of_copies_is_not_exact() -> None:
    state = net(1)
    copies = [state, permuted(state, 2)[0]]
    soft, sharp = (
        match(copies, MatchOptions(method="ot", regularisation=share)).state_dict()["0.weight"]
        for share in (1.0, SHARP)
    )
    assert torch.allclose(sharp, state["0.weight"], rtol=0, atol=TIGHT)
    assert (soft - state["0.weight"]).abs().max() > 1e-2


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 8), (8, 3)])
@pytest.mark.parametrize("epsilon", [1e-4, 1e-2, 0.3, 1.0])
def test_couplings_have_even_sums(shape: tuple[int, int], epsilon: float) -> None:
    found = coupling(np.random.default_rng(0).random(shape), epsilon)
    assert found.min() >= 0
    assert np.allclose(found.sum(1), 1 / shape[0], rtol=1e-12)
    assert np.allclose(found.sum(0), 1 / shape[1], rtol=1e-12)


@pytest.mark.parametrize("shape", [(5, 5), (3, 8)])
def test_couplings_are_those_of_the_plain_scaling(shape: tuple[int, int]) -> None:
    costs = np.random.default_rng(1).random(shape)
    assert np.allclose(coupling(costs, 0.1), plain_coupling(costs, 0.1), rtol=0, atol=1e-8)


def test_units_that_are_all_alike_couple_evenly() -> None:
    assert np.allclose(coupling(np.zeros((4, 2)), 0.01), 1 / 8)


def test_a_record_replays_to_the_same_bytes_and_is_verified(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.pt" for name in "ab"]
    for seed, path in enumerate(paths):
        torch.save(net(seed), path)
    merge = match(paths, SMALL, output=tmp_path / "one.pt")
    match(paths, merge.options, output=tmp_path / "two.pt")
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()
    found = verify(tmp_path / "one.pt", paths)
    assert (found.ok, found.recomputed, found.fitted) == (True, 2, 5)  # the last bias is a mean
    other = verify(tmp_path / "one.pt", [paths[0]])
    assert not other.ok


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "ot", "max_growth": 2.0}, "couples all units at the widest client's widths"),
        ({"method": "fedma", "regularisation": 0.1}, "`regularisation` is for `method=ot`"),
        ({"method": "ot", "regularisation": 0.0}, "`regularisation` is 0.0, expected a number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        MatchOptions(**options)  # type: ignore[arg-type]
