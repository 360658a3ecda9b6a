"""The black box: one layer of several clients, without files and plans."""

from typing import Any

import numpy as np
import pytest
import torch

import fedmerge
from fedmerge.values import Array


def layer(seed: int, units: int = 6, inputs: int = 5) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(units, inputs)), rng.normal(size=units)


def permuted(parts: tuple[Array, ...], order: list[int]) -> tuple[Array, ...]:
    return tuple(part[order] for part in parts)


ORDER = [3, 0, 5, 1, 4, 2]


def test_a_permuted_copy_is_matched_to_its_units() -> None:
    first = layer(0)
    (weight, bias), assignments = fedmerge.match_layer([first, permuted(first, ORDER)])
    assert assignments[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert assignments[1].tolist() == ORDER
    np.testing.assert_array_equal(weight, first[0])
    np.testing.assert_array_equal(bias, first[1])


def test_other_units_are_not_matched_to_a_copys() -> None:
    """The negative control: without the copy, the same call finds another order, or none."""
    _, assignments = fedmerge.match_layer([layer(0), layer(1)], max_growth="none")
    assert assignments[1].tolist() != ORDER
    assert assignments[1].max() >= 6  # some units found no partner


def test_units_without_a_partner_become_new_ones() -> None:
    first, other = layer(0), layer(1, units=2)
    joined = tuple(np.concatenate(pair) for pair in zip(first, other, strict=True))
    (weight, _), assignments = fedmerge.match_layer([joined, first], max_growth="none")
    assert weight.shape == (8, 5)
    assert assignments[1].tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(weight[6:], other[0])


def test_growth_is_limited() -> None:
    (weight, _), _ = fedmerge.match_layer([layer(0), layer(1)], max_growth=1)
    assert len(weight) == 6
    (weight, _), _ = fedmerge.match_layer([layer(0), layer(1)], max_growth=1.5)
    assert 6 < len(weight) <= 9


def test_clients_count_by_their_weights() -> None:
    (weight, _), assignments = fedmerge.match_layer(
        [layer(0), layer(1)], max_growth=1, client_weights=[3, 1]
    )
    back = np.argsort(assignments[1])
    expected = 0.75 * layer(0)[0] + 0.25 * layer(1)[0][back]
    np.testing.assert_allclose(weight[assignments[0]], expected, rtol=1e-12)


def test_the_matching_is_that_of_whole_models() -> None:
    """For the first layer of a net, `match` compares the same numbers."""
    states = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        shapes = {"fc1.weight": (7, 4), "fc1.bias": (7,), "fc2.weight": (2, 7), "fc2.bias": (2,)}
        states.append(
            {n: torch.from_numpy(rng.normal(size=s).astype("f4")) for n, s in shapes.items()}
        )
    merge = fedmerge.match(states, max_growth="none", refine=0, match_threshold=0.4)
    found = fedmerge.match_layer(
        [(s["fc1.weight"], s["fc1.bias"]) for s in states], max_growth="none", match_threshold=0.4
    )
    for placement, assignment in zip(merge.placements, found.assignments, strict=True):
        assert placement["fc1"].indices.tolist() == assignment.tolist()
    assert torch.allclose(found.layer[0], merge.state_dict()["fc1.weight"], atol=1e-6)


def test_a_net_of_matched_layers_computes_what_its_permuted_copies_do() -> None:
    """The example of the documentation: the next layer's inputs follow the assignments."""
    (weight, bias), (out, _) = layer(0), layer(1, units=3, inputs=6)
    clients = [(weight, bias, out), (weight[ORDER], bias[ORDER], out[:, ORDER])]
    (merged, merged_bias), assignments = fedmerge.match_layer([c[:2] for c in clients])
    merged_out = np.zeros((3, len(merged)))
    for (_, _, own), places in zip(clients, assignments, strict=True):
        merged_out[:, places] += own / 2
    x = np.random.default_rng(2).normal(size=(10, 5))
    expected = np.tanh(x @ weight.T + bias) @ out.T
    found = np.tanh(x @ merged.T + merged_bias) @ merged_out.T
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    unmatched = np.tanh(x @ weight.T + bias) @ ((out + out[:, ORDER]) / 2).T
    assert not np.allclose(unmatched, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_tensors_come_back_as_they_were_given(dtype: torch.dtype) -> None:
    given = torch.from_numpy(layer(0)[0]).to(dtype)
    found, _ = fedmerge.match_layer([given, given[ORDER]])
    assert found.dtype == dtype
    assert torch.equal(found, given)


def test_an_array_keeps_its_type() -> None:
    given = layer(0)[0].astype(np.float16)
    found, _ = fedmerge.match_layer([given, given[ORDER]])
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, given)


def test_convolutions_are_layers_too() -> None:
    kernels = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    found, assignments = fedmerge.match_layer([kernels, kernels[ORDER]])
    assert torch.equal(found, kernels)
    assert assignments[1].tolist() == ORDER


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([], {}, "`layers` is no list"),
        (np.ones((2, 3)), {}, "`layers` is no list"),
        ([np.ones((2, 3)), np.ones((2, 4))], {}, r"client-2 have the shapes \[\(4,\)\]"),
        ([np.ones((2, 3)), np.full((2, 3), np.nan)], {}, "client-2 has NaN"),
        ([np.ones((2, 3), int)], {}, "client-1 has int64 numbers"),
        ([torch.ones(2, 3, dtype=torch.int32)], {}, "client-1 has torch.int32 numbers"),
        ([np.ones((0, 3))], {}, "client-1 has no units"),
        (["a.pt"], {}, "client-1 has str"),
        ([[]], {}, "client-1 has list"),
        ([[np.ones((2, 3)), np.ones(3)]], {}, r"the shapes \(2, 3\), \(3,\)"),
        ([np.ones((2, 3))], {"client_weights": [1, 2]}, "positive number for each of 1 "),
        ([np.ones((2, 3))], {"client_weights": [0.0]}, "positive number"),
        ([np.ones((2, 3))], {"match_threshold": 0}, "`match_threshold` is 0"),
        ([np.ones((2, 3))], {"max_growth": 0.5}, "`max_growth` is 0.5"),
        ([np.ones((2, 3))], {"seed": -1}, "`seed` is -1"),
    ],
)
def test_what_is_no_layer_is_refused(layers: Any, options: Any, message: str) -> None:
    with pytest.raises(fedmerge.UsageError, match=message):
        fedmerge.match_layer(layers, **options)
