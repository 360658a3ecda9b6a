"""An aggregator for NVFLARE's own controllers."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

import fedmerge
from tests.permuted_nets import outputs, permuted, trained

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None,
    reason="NVFLARE is not installed: pip install 'fedmerge[nvflare]'",
)


def sent(params: Any, client: str, *, steps: int = 10, **fields: Any) -> Any:
    from nvflare.apis.fl_constant import FLMetaKey
    from nvflare.app_common.abstract.fl_model import FLModel

    meta = {"client_name": client, FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps}
    return FLModel(params=params, meta=meta, **fields)


def aggregated(*models: Any, **options: Any) -> Any:
    from fedmerge.nvflare import MatchedAggregator

    aggregator = MatchedAggregator(**options)
    for model in models:
        aggregator.accept_model(model)
    return aggregator.aggregate_model()


def test_units_in_another_order_are_averaged_with_their_like() -> None:
    models = [sent(permuted(trained(), seed), f"site-{seed}") for seed in (1, 2)]
    merged = aggregated(*models).params
    torch.testing.assert_close(outputs(merged), outputs(trained()), rtol=1e-5, atol=1e-6)
    plain = {name: (models[0].params[name] + models[1].params[name]) / 2 for name in merged}
    assert (outputs(plain) - outputs(trained())).abs().max() > 0.1  # the negative control


def test_clients_count_by_their_steps() -> None:
    other = {name: tensor + 0.01 for name, tensor in trained().items()}
    found = aggregated(
        sent(trained(), "a", steps=30, metrics={"loss": 1.0, "note": "fine"}),
        sent(other, "b", steps=10, metrics={"loss": 3.0}),
    )
    expected = {name: tensor + 0.0025 for name, tensor in trained().items()}
    torch.testing.assert_close(found.params, expected)
    assert found.metrics == {"loss": 1.5}
    assert found.meta["nr_aggregated"] == 2


def test_arrays_come_back_as_arrays() -> None:
    arrays = {name: tensor.numpy() for name, tensor in trained().items()}
    found = aggregated(sent(arrays, "a"), sent(arrays, "b")).params
    assert all(isinstance(value, np.ndarray) for value in found.values())
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_a_client_with_nan_is_left_out() -> None:
    broken = {name: tensor * np.nan for name, tensor in trained().items()}
    found = aggregated(sent(broken, "a"), sent(trained(), "b"))
    torch.testing.assert_close(found.params, trained())
    assert found.meta["nr_aggregated"] == 1


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(fedmerge.TrainingError, match="no client sent a model"):
        aggregated()


def test_differences_are_refused() -> None:
    with pytest.raises(fedmerge.TrainingError, match="site-1 sent a difference of parameters"):
        aggregated(sent(trained(), "site-1", params_type="DIFF"))


def test_rounds_do_not_mix() -> None:
    from fedmerge.nvflare import MatchedAggregator

    aggregator = MatchedAggregator()
    for shift in (0.0, 5.0):
        for client in ("a", "b"):
            aggregator.accept_model(
                sent({name: tensor + shift for name, tensor in trained().items()}, client)
            )
        found = aggregator.aggregate_model().params["4.bias"]
        torch.testing.assert_close(found, trained()["4.bias"] + shift)
