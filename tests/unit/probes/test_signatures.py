"""Responses of units to probes: they follow the units, whatever the order of the others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture import solve_widths
from fedmerge.architecture.from_code import permuted, plan_model, random_moves
from fedmerge.probes import Probes, normalised, unit_responses
from fedmerge.values import Assignment, FloatArray, Plan
from tests.model_zoo import ZOO, Model

CLOSE = 1e-4  # single precision, in sums of other orders; of the largest response
NAMES = [
    *("mlp", "residual mlp", "vgg", "channels-last flatten", "resnet B", "densenet"),
    *("lstm, 2 layers, both directions", "gru, 2 layers", "language model", "vit", "llama"),
    *("mobilenet", "transformer encoder"),
]


def scene(name: str) -> tuple[Model, nn.Module, Plan, dict[str, int]]:
    """Return a model of the zoo with random values, its plan and widths."""
    torch.manual_seed(1)
    entry = ZOO[name]
    model = entry.build().eval()
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(0.5 * torch.randn_like(tensor))
            if "var" in key:
                tensor.copy_(0.5 + torch.rand_like(tensor))
    plan = plan_model(model, entry.inputs())
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    return entry, model, plan, solve_widths(plan, shapes, source=name)


def probes(entry: Model, count: int = 20) -> Probes:
    generator = torch.Generator().manual_seed(3)
    shape = (count, *entry.shapes[0][1:])
    made: Tensor = torch.randn(shape, generator=generator)
    if entry.tokens:
        made = torch.randint(entry.tokens, shape, generator=generator)
    return Probes((made,), "noise")


def responses(
    model: nn.Module, plan: Plan, widths: Mapping[str, int], given: Probes, seed: int = 0
) -> dict[str, FloatArray]:
    names = {name: name for name in model.state_dict()}
    return unit_responses(model, plan, widths, given, names=names, seed=seed, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_moved_units_take_their_responses_with_them(name: str) -> None:
    entry, model, plan, widths = scene(name)
    rng = np.random.default_rng(5)
    moves = random_moves(plan, widths, rng)
    other = permuted(model, plan, moves, widths)
    before, after = (responses(m, plan, widths, probes(entry)) for m in (model, other))
    assert before.keys() == after.keys()
    told = 0
    outer = {g: Assignment(moves[g], widths[g]) for g in plan.inside.values()}
    for group, own in before.items():
        scale = float(np.abs(own).max())
        places = Assignment(moves[group], widths[group]).numbers(
            outer.get(plan.inside.get(group, ""))
        )
        assert np.abs(after[group][places] - own).max() < CLOSE * scale, group
        apart = np.abs(after[group][np.roll(places, 1)] - own).max() if len(own) > 1 else 0.0
        told += apart > 10 * CLOSE * scale
    assert told  # another order is another answer


def test_units_answer_as_the_next_weight_reads_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    x = torch.randn(20, 6)
    plan = plan_model(model, (x[:2],))
    (group,) = plan.groups
    found = responses(model, plan, {group.name: 4}, Probes((x,), "data"))[group.name]
    np.testing.assert_array_equal(found, model[:2](x).detach().numpy().T)  # all rows: few probes
    assert not np.array_equal(found, model[:1](x).detach().numpy().T)  # after the non-linearity


def test_weights_without_a_name_do_not_count() -> None:
    entry, model, plan, widths = scene("mlp")
    found = unit_responses(
        model, plan, widths, probes(entry), names={"4.weight": "4.weight"}, seed=0, device="cpu"
    )
    assert len(found) == 1
    assert len(responses(model, plan, widths, probes(entry))) == 2


def test_the_seed_chooses_the_rows_and_every_client_gets_the_same() -> None:
    entry, model, plan, widths = scene("vgg")
    given = probes(entry, 200)
    first, again = (responses(model, plan, widths, given) for _ in range(2))
    other = responses(model, plan, widths, given, seed=1)
    group = plan.groups[0].name
    np.testing.assert_array_equal(first[group], again[group])
    assert first[group].shape[1] < 200 * entry.shapes[0][2] * entry.shapes[0][3]  # some, not all
    assert first[group].shape == other[group].shape
    assert not np.array_equal(first[group], other[group])


def test_normalised_responses_multiply_to_correlations_and_dead_units_to_nothing() -> None:
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(4, 50)).astype(np.float32)
    raw[1] = 3 * raw[0] + 7
    raw[2] = 5.0
    unit = normalised(raw)
    assert float(unit[0] @ unit[1]) == pytest.approx(1, abs=1e-5)
    assert float(unit[0] @ unit[3]) == pytest.approx(np.corrcoef(raw[0], raw[3])[0, 1], abs=1e-5)
    np.testing.assert_array_equal(unit[2], np.zeros(50))
    huge = normalised(np.array([[1e30, -1e30], [np.nan, np.inf]], np.float32))
    np.testing.assert_allclose(huge, [[0.5**0.5, -(0.5**0.5)], [0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(normalised(np.zeros((1, 5), np.float32)), np.zeros((1, 5)))
