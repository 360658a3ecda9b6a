"""The clients of the benchmarks are what their names say."""

from pathlib import Path

import pytest
import torch

from benchmarks.cases import Case, run
from benchmarks.memory import largest_group
from benchmarks.nets import NETS, char_lstm, independent, independent_clients, noisy_copies
from benchmarks.processes import save_pt, save_safetensors
from benchmarks.wide import measure
from fedmerge import match


@pytest.mark.parametrize("net", ["LeNet-5", "char-LSTM"])
def test_copies_match_completely_and_independent_nets_do_not(net: str) -> None:
    copies = run(Case(net, "copies", 3).problem()).matchings
    apart = run(Case(net, "nothing matches", 3).problem()).matchings
    assert {matching.match_rate for matching in copies.values()} == {1.0}
    assert max(matching.match_rate for matching in apart.values()) < 0.3


def test_reordering_keeps_the_function_of_an_lstm() -> None:
    net = char_lstm(tokens=5, embedding=3, hidden=4)
    state = independent(net, 0)
    reordered = net.reorder(dict(state), torch.Generator().manual_seed(1))
    merged = match([state, reordered]).state_dict()
    assert not torch.equal(reordered["rnn.weight_hh_l0"], state["rnn.weight_hh_l0"])
    for name, tensor in state.items():
        torch.testing.assert_close(merged[name], tensor)


def test_clients_are_made_again_alike() -> None:
    net = NETS["LeNet-5"]()
    for make in (noisy_copies, independent_clients):
        once, again = (list(make(net, 2)) for _ in range(2))
        for one, other in zip(once, again, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in net.shapes)
        assert not torch.equal(once[0]["conv1.weight"], once[1]["conv1.weight"])


def test_the_large_net_fills_400_megabytes() -> None:
    assert 4 * NETS["large VGG"]().numbers == pytest.approx(400e6, rel=0.01)


def test_the_largest_group_counts_every_tensor_that_it_is_an_axis_of(tmp_path: Path) -> None:
    files = save_safetensors(tmp_path, "LeNet-5", 2)
    # 120 units: fc1.weight, fc1.bias and the columns of fc2.weight
    assert largest_group(files[0]) == {"bytes": 4 * (120 * 400 + 120 + 84 * 120)}


def test_files_hold_the_clients(tmp_path: Path) -> None:
    files = save_pt(tmp_path, 2)
    expected = list(independent_clients(NETS["LeNet-5"](), 2))
    for file, state in zip(files, expected, strict=True):
        found = torch.load(file, weights_only=True)
        assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("kind", "width"),
    [("copies", 40), ("nothing matches", 120), ("independent, as wide as one client", 40)],
)
def test_a_wide_group_ends_as_wide_as_its_kind_says(kind: str, width: int) -> None:
    measured = measure(kind, units=40, features=300, clients=3)
    assert measured["width"] == width
    assert 0 < measured["solving"] < measured["wall"]
    assert measured["steps"] >= 3
