"""Which layers can be compared row by row, and which batch norms are a layer's own."""

from __future__ import annotations

import pytest

from fedmerge.merging import (
    ClientModules,
    MatchOptions,
    open_clients,
    own_norms,
    prepare,
    steady_weights,
)
from tests.model_zoo import ZOO
from tests.unit.merging.test_fit import code, fresh


def models_of(name: str) -> ClientModules:
    options = MatchOptions()
    states = [dict(fresh(name, seed).state_dict()) for seed in (1, 2)]
    clients = open_clients(states, options.reading)
    return ClientModules(prepare(clients, options, model=code(name)))


@pytest.mark.parametrize("name", ["vgg", "lstm, 2 layers, both directions", "densenet"])
def test_layers_over_samples_and_places_are_steady(name: str) -> None:
    models = models_of(name)
    weights = {n for n, tensor in models.session.plan.tensors.items() if len(tensor.axes) > 1}
    assert steady_weights(models, ZOO[name].inputs()) == weights


def test_a_mixers_layers_over_tokens_have_units_for_rows() -> None:
    models = models_of("mlp-mixer")
    found = steady_weights(models, ZOO["mlp-mixer"].inputs())
    weights = {n for n, t in models.session.plan.tensors.items() if len(t.axes) > 1}
    assert {n for n in weights - found if "tokens" in n} == {n for n in weights if "tokens" in n}
    assert {n for n in weights if "channels" in n} <= found


def test_norms_whose_input_others_read_too_are_not_their_layers_own() -> None:
    models = models_of("pre-activation resnet")
    planned = {norm.producer for norm in models.session.plan.norms}
    own = {norm.producer for norm in own_norms(models, ZOO["pre-activation resnet"].inputs())}
    assert planned - own == {"stem.weight"}  # the residual stream goes on past the norm
    assert own == {"convs1.0.weight", "convs1.1.weight"}


@pytest.mark.parametrize("name", ["vgg", "resnet B", "mlp with norms"])
def test_norms_that_alone_read_a_layer_are_its_own(name: str) -> None:
    models = models_of(name)
    assert models.session.plan.norms
    assert own_norms(models, ZOO[name].inputs()) == models.session.plan.norms
