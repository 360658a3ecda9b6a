"""A drop-in for Flower's FedAvg: any ClientApp stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from tests.flower import ThreadGrid, needs_flower
from tests.permuted_nets import State, outputs, permuted, trained

pytestmark = [
    needs_flower,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),  # Flower's own
]

NODES: Mapping[int, Mapping[str, Any]] = {1: {"partition-id": 0}, 2: {"partition-id": 1}}


def run(strategy: Any, reply: Callable[[int, State], State], *, samples: Any = None) -> State:
    """Return the arrays after one round in which nodes reply what is given."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Message:
        place = int(context.node_config["partition-id"])
        arrays = reply(place, message.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"num-examples": 10 if samples is None else samples[place]})
        return Message(RecordDict({"a": ArrayRecord(arrays), "m": metrics}), reply_to=message)

    result = strategy.start(ThreadGrid(app, NODES), ArrayRecord(trained()), num_rounds=1)
    arrays: State = result.arrays.to_torch_state_dict()
    return arrays


def strategy(**options: Any) -> Any:
    from fedmerge.flower import MatchedAveraging

    return MatchedAveraging(fraction_evaluate=0.0, **options)


def test_units_in_another_order_are_averaged_with_their_like() -> None:
    merged = run(strategy(), lambda place, state: permuted(trained(), place))
    torch.testing.assert_close(outputs(merged), outputs(trained()), rtol=1e-5, atol=1e-6)


def test_flowers_own_average_mixes_them() -> None:
    """The negative control."""
    from flwr.serverapp.strategy import FedAvg

    plain = FedAvg(fraction_evaluate=0.0)
    merged = run(plain, lambda place, state: permuted(trained(), place))
    assert (outputs(merged) - outputs(trained())).abs().max() > 0.1


def test_clients_that_stayed_in_place_give_what_fedavg_gives() -> None:
    from flwr.serverapp.strategy import FedAvg

    def reply(place: int, state: State) -> State:
        generator = torch.Generator().manual_seed(place)
        return {n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in state.items()}

    matched = run(strategy(), reply, samples=[30, 10])
    plain = run(FedAvg(fraction_evaluate=0.0), reply, samples=[30, 10])
    for name, tensor in plain.items():
        torch.testing.assert_close(matched[name], tensor.to(torch.float32), rtol=1e-5, atol=1e-6)


def test_the_model_keeps_its_names_shapes_and_types() -> None:
    merged = run(strategy(), lambda place, state: permuted(trained(), place))
    assert {n: (t.shape, t.dtype) for n, t in merged.items()} == {
        n: (t.shape, t.dtype) for n, t in trained().items()
    }


def test_a_client_with_nan_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def reply(place: int, state: State) -> State:
        return state if place else {name: tensor * np.nan for name, tensor in state.items()}

    with caplog.at_level(logging.WARNING, logger="flwr"):
        merged = run(strategy(), reply)
    torch.testing.assert_close(merged, trained())


def test_clients_without_samples_do_not_count() -> None:
    def reply(place: int, state: State) -> State:
        return {name: tensor * (1 if place else 100) for name, tensor in state.items()}

    merged = run(strategy(), reply, samples=[0, 5])
    torch.testing.assert_close(outputs(merged), outputs(trained()))


class Residual(nn.Module):
    """The second layer adds to the first one's units: names and shapes do not say that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.fc1(x))
        found: torch.Tensor = self.fc3(hidden + torch.relu(self.fc2(hidden)))
        return found


def test_a_net_that_is_no_chain_takes_its_code() -> None:
    from flwr.app import ArrayRecord, ConfigRecord

    torch.manual_seed(0)
    arrays, grid = ArrayRecord(Residual().state_dict()), ThreadGrid(None, NODES)
    groups = []
    for made in (strategy(model=Residual), strategy()):
        assert len(list(made.configure_train(1, arrays, ConfigRecord(), grid))) == 2
        groups.append([group.name for group in made._average.plan({}).groups])
    assert groups == [["fc1"], ["fc1", "fc2"]]  # without the code: what a chain would have


def test_what_would_grow_is_refused() -> None:
    with pytest.raises(fedmerge.UsageError, match=r"`max_growth` is 1\.5, expected 1"):
        strategy(match={"max_growth": 1.5})


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(fedmerge.UsageError, match="there is no option `max_grow`"):
        strategy(match={"max_grow": 1})
