"""Which tensors are decided in which round, counted by hand."""

from __future__ import annotations

import pytest
import torch

import fedmerge
from fedmerge.federated import averaging_rounds, layers_of, matching_rounds
from tests.unit.federated.nets import plan_of


def decided(net: str) -> list[tuple[str, set[str]]]:
    return [(layer.label, set(layer.tensors)) for layer in layers_of(plan_of(net))]


def test_a_chain_is_decided_layer_by_layer() -> None:
    assert decided("Lenet") == [
        ("conv1", {"conv1.weight", "conv1.bias"}),
        ("conv2", {"conv2.weight", "conv2.bias"}),
        ("fc1", {"fc1.weight", "fc1.bias"}),
        ("last layer", {"fc2.weight", "fc2.bias"}),
    ]


def test_what_a_block_adds_is_decided_after_it_was_trained_on_what_it_reads() -> None:
    norms = [f"norm{k}" for k in range(3)]
    of_norm = {
        norm: {f"{norm}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")}
        for norm in norms
    }
    assert decided("Residual") == [
        ("stem", {"stem.weight", *of_norm["norm0"]}),
        ("conv1", {"conv1.weight", *of_norm["norm1"]}),
        ("conv2", {"conv2.weight", "conv2.bias", *of_norm["norm2"]}),
        ("last layer", {"head.weight", "head.bias"}),
    ]


def test_recurrent_weights_are_decided_with_their_layer() -> None:
    labels = [label for label, _ in decided("Chars")]
    layer0 = {f"rnn.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    layer1 = {name.replace("l0", "l1") for name in layer0}
    assert len(labels) == 4
    assert [tensors for _, tensors in decided("Chars")] == [
        {"embed.weight"},
        layer0,
        layer1,
        {"out.weight", "out.bias"},
    ]


def test_every_tensor_is_decided_once() -> None:
    for net in ("mlp", "Lenet", "Residual", "Chars"):
        tensors = [name for _, names in decided(net) for name in names]
        assert sorted(tensors) == sorted(plan_of(net).tensors)


def test_stages_and_epochs_follow_the_appendix() -> None:
    plan = plan_of("Lenet")
    rounds = matching_rounds(
        plan,
        2,
        epochs=5,
        first_epochs=0,
        last_epochs_factor=3,
        trainable=plan.tensors,
    )
    stages = [(r.pass_number, r.stage, r.epochs, r.completes) for r in rounds]
    one = [("partial", 5, False), ("partial", 5, False), ("last", 15, True)]
    assert stages == [
        (1, "whole", 0, False),
        *((1, *entry) for entry in one),
        (2, "whole", 5, False),
        *((2, *entry) for entry in one),
    ]
    assert [r.number for r in rounds] == list(range(1, 9))


def test_nothing_is_trained_where_every_parameter_is_frozen() -> None:
    plan = plan_of("Lenet")
    trainable = [name for name in plan.tensors if not name.startswith("fc2")]
    rounds = matching_rounds(
        plan, 1, epochs=5, first_epochs=2, last_epochs_factor=3, trainable=trainable
    )
    assert [r.epochs for r in rounds] == [2, 5, 5, 0]


@pytest.mark.parametrize("count", [1, 3])
def test_every_round_of_an_average_decides_everything(count: int) -> None:
    plan = plan_of("mlp")
    rounds = averaging_rounds(plan, count, epochs=4, first_epochs=1)
    assert [set(r.layer.tensors) for r in rounds] == [set(plan.tensors)] * count
    assert [r.epochs for r in rounds] == [1, 4, 4][:count]
    assert all(r.completes and r.stage == "whole" for r in rounds)


def test_a_net_without_hidden_units_has_one_layer() -> None:
    torch.manual_seed(0)
    plan = fedmerge.plan([{"fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}])
    assert [layer.label for layer in layers_of(plan)] == ["last layer"]
