"""Fitted layers: exact on copies and on nothing matched, closer to the ensemble than averages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.api import match
from fedmerge.architecture import ModelCode, resize_module, solve_widths
from fedmerge.architecture.from_code import permuted, plan_model, random_moves
from fedmerge.merging import MatchOptions, Merge, agreement, fit, targets
from fedmerge.probes import ProbeOptions, noise_probes
from tests import digits
from tests.model_zoo import ZOO

SAME = 1e-5  # of the largest output, single precision
PROBES = ProbeOptions("noise", count=60)
COPIES = [
    *("mlp", "mlp with norms", "vgg", "resnet B", "pre-activation resnet", "densenet"),
    *("lstm, 2 layers", "lstm, 2 layers, both directions", "gru, 2 layers", "shared layer"),
    *("gru, both directions", "rnn, relu", "tied language model", "own matrices"),
    *("mlp-mixer", "gpt", "u-net", "lstm cell"),
]
DEEP = ("densenet", "gpt", "u-net")  # which take seconds
CHAINS = ["mlp", "lenet", "lstm", "gru, 2 layers", "lstm, 2 layers, both directions"]

State = dict[str, Tensor]


def build(name: str) -> nn.Module:
    """Return a model of the zoo: the factory of the merges here."""
    return ZOO[name].build()


def code(name: str) -> ModelCode:
    dtypes = ("long",) if ZOO[name].tokens else ()
    return ModelCode(f"{__name__}:build", {"name": name}, (ZOO[name].shapes[0],), dtypes)


def fresh(name: str, seed: int) -> nn.Module:
    """Return a model with random values everywhere, of outputs of about one."""
    torch.manual_seed(seed)
    model = build(name).eval()
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.dim():
            tensor.copy_(torch.randn_like(tensor) / max(1, tensor[0].numel()) ** 0.5)
            if "var" in key:
                tensor.copy_(0.5 + torch.rand_like(tensor))
    return model


def copies(model: nn.Module, name: str, count: int = 3) -> list[State]:
    """Return a model's state and others of the same function, with units in other orders."""
    plan = plan_model(model, ZOO[name].inputs())
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    widths = solve_widths(plan, shapes, source=name)
    rng = np.random.default_rng(0)
    moves = (random_moves(plan, widths, rng) for _ in range(count - 1))
    moved = [permuted(model, plan, own, widths) for own in moves]
    return [dict(each.state_dict()) for each in (model, *moved)]


def outputs(model: nn.Module, name: str, seed: int = 7) -> Tensor:
    """Return what a model of the zoo makes of inputs that no merge has seen."""
    generator = torch.Generator().manual_seed(seed)
    shape = (16, *ZOO[name].shapes[0][1:])
    x: Tensor = torch.randn(shape, generator=generator)
    if ZOO[name].tokens:
        x = torch.randint(ZOO[name].tokens, shape, generator=generator)
    with torch.no_grad():
        found = model.eval()(x)
    assert isinstance(found, Tensor)
    return found


def loaded(name: str, state: State) -> nn.Module:
    model = build(name).eval()
    resize_module(model, {key: tuple(tensor.shape) for key, tensor in state.items()})
    model.load_state_dict(state)
    return model


def merged(states: list[State], name: str, **options: Any) -> Merge:
    return match(states, MatchOptions(**options), model=code(name), probes=PROBES)


@pytest.mark.parametrize("units", ["mean", "fit"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in DEEP else []) for n in COPIES]
)
def test_permuted_copies_merge_back_to_the_function(
    name: str, units: Literal["mean", "fit"]
) -> None:
    model = fresh(name, 1)
    merge = merged(copies(model, name), name, max_growth=1, merge_units=units, lead="none")
    assert merge.growth == 1
    assert all(group.match_rate == 1 for group in merge.groups)
    expected = outputs(model, name)
    found = outputs(loaded(name, merge.state_dict()), name)
    assert float((found - expected).abs().max() / expected.abs().max()) < SAME
    is_fitted = units == "fit" and name != "own matrices"  # whose weights are all used twice
    assert bool(merge.fitted) == is_fitted
    plain = match(copies(model, name), MatchOptions(method="average"), model=code(name))
    apart = outputs(loaded(name, plain.state_dict()), name) - expected
    assert float(apart.abs().max() / expected.abs().max()) > 100 * SAME


@pytest.mark.parametrize("name", CHAINS)
def test_where_nothing_is_matched_the_fitted_model_is_the_ensemble(name: str) -> None:
    models = [fresh(name, seed) for seed in (1, 2)]
    merge = merged(
        [dict(model.state_dict()) for model in models],
        name,
        match_threshold=1.0,
        max_growth="none",
        merge_units="fit",
        lead="none",
    )
    assert all(group.match_rate == 0 for group in merge.groups)
    assert merge.fitted
    each = [outputs(model, name) for model in models]
    found, expected = outputs(loaded(name, merge.state_dict()), name), (each[0] + each[1]) / 2
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) < 1e-3 * scale
    assert float((each[0] - expected).abs().max()) > 1e-2 * scale


@pytest.mark.parametrize(
    "name", ["mlp", "lenet", pytest.param("vgg", marks=pytest.mark.slow), "gru, 2 layers"]
)
def test_fitted_layers_are_closer_to_the_ensemble_than_averaged_ones(name: str) -> None:
    models = [fresh(name, seed) for seed in (1, 2)]
    states = [dict(model.state_dict()) for model in models]
    each = [outputs(model, name) for model in models]
    explained = {}
    for units in ("mean", "fit"):
        merge = merged(states, name, merge_units=units, lead="none")
        found = outputs(loaded(name, merge.state_dict()), name)
        explained[units] = agreement(found, (each[0] + each[1]) / 2).explained
    assert explained["fit"] > explained["mean"] + 0.05


def test_a_batch_norm_behind_a_fitted_layer_knows_its_input() -> None:
    name = "vgg"
    states = [dict(fresh(name, seed).state_dict()) for seed in (1, 2)]
    unchanged = ProbeOptions("noise", count=60, augment=("none",))
    options = MatchOptions(merge_units="fit", lead="none")
    merge = match(states, options, model=code(name), probes=unchanged)
    model, seen = loaded(name, merge.state_dict()), dict[str, Tensor]()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for own, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, given, own=own: seen.update({own: given[0]}))
    made = noise_probes(ZOO[name].inputs(), 60, mean=0.0, std=1.0, seed=0, tokens=None)
    kept, _ = made.split(12, seed=0)
    with torch.no_grad():
        model(*kept.inputs)
    assert norms
    for own, norm in norms.items():
        rows = seen[own].movedim(1, -1).flatten(0, -2)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert torch.allclose(norm.running_mean, rows.mean(0), rtol=0, atol=1e-3)
        variance = rows.var(0, unbiased=False)
        assert torch.allclose(norm.running_var, variance, rtol=1e-2, atol=1e-4)
        assert not torch.allclose(norm.running_var, 1.2 * variance, rtol=1e-2, atol=1e-4)


def test_a_layer_with_too_many_inputs_stays_an_average(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [dict(fresh("mlp", seed).state_dict()) for seed in (1, 2)]
    options: dict[str, Any] = {"merge_units": "fit", "lead": "none"}
    every = merged(states, "mlp", **options).fitted
    monkeypatch.setattr(fit, "MOST_INPUTS", 7)
    some = merged(states, "mlp", **options).fitted
    assert set(some) == {"0.weight", "0.bias"}
    assert set(every) > set(some)


def test_memory_bounds_the_rows_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [dict(fresh("lenet", seed).state_dict()) for seed in (1, 2)]
    merge = merged(states, "lenet", merge_units="fit", lead="none")
    weights = [name for name in merge.plan.tensors if name.endswith("weight")]
    assert targets._most_rows([merge], weights) == targets.ROWS
    monkeypatch.setattr(targets, "MOST_NUMBERS", 2000)
    rows = targets._most_rows([merge], weights)
    assert 1 <= rows < 100
    fewer = merged(states, "lenet", merge_units="fit", lead="none")
    assert fewer.quality is not None
    assert np.isfinite(fewer.quality.merged.explained)
    assert not np.array_equal(fewer.read(weights[0]), merge.read(weights[0]))


def test_a_class_that_one_client_never_saw_is_the_others() -> None:
    states = [digits.client(1), digits.client(2)]
    counts = {"client-1": [10.0] * 10, "client-2": [10.0] * 9 + [0.0]}
    found = {}
    for case, given in {"counted": counts, "not counted": None}.items():
        merge = match(
            states,
            MatchOptions(
                match_threshold=1.0, max_growth="none", merge_units="fit", lead="none",
                class_counts=given,
            ),
            model=ModelCode(digits.MODEL, {}, ((2, 1, 8, 8),)),
            probes=PROBES,
        )  # fmt: skip
        found[case] = digits.logits(merge.state_dict())
    one, two = (digits.logits(state) for state in states)
    assert torch.allclose(found["counted"][:, 9], one[:, 9], rtol=0, atol=0.02)
    assert torch.allclose(found["counted"][:, 0], (one + two)[:, 0] / 2, rtol=0, atol=0.02)
    assert not torch.allclose(found["not counted"][:, 9], one[:, 9], rtol=0, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_come_back_as_they_were(dtype: torch.dtype) -> None:
    states = [
        {key: tensor.to(dtype) for key, tensor in state.items()}
        for state in copies(fresh("mlp", 1), "mlp")
    ]
    merge = match(
        states,
        replace(MatchOptions(), merge_units="fit", lead="none", max_growth=1),
        model=code("mlp"),
    )
    found = merge.state_dict()
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert merge.fitted
    tolerance = 0.05 if dtype != torch.float64 else SAME
    one, two = (
        outputs(loaded("mlp", {k: t.float() for k, t in state.items()}), "mlp")
        for state in (states[0], found)
    )
    assert torch.allclose(one, two, rtol=0, atol=tolerance * float(one.abs().max()))
