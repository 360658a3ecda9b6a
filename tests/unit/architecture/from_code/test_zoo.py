"""Every model of the zoo: its groups are the hand-counted ones, sound, and grow as claimed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge.architecture import plan_from_json, plan_to_json, solve_widths
from fedmerge.architecture.from_code import plan_model, probe_growth, verify_plan
from fedmerge.errors import ArchitectureError
from fedmerge.values import (
    Layout,
    Pinned,
    Plan,
    Units,
    axis_size,
    groups_in,
    replace_groups,
    with_inside,
)
from tests.clients import plan_of
from tests.model_zoo import ZOO, Model
from tests.zoo import ZOO as CHAINS

MODELS = pytest.mark.parametrize("model", ZOO.values(), ids=ZOO.keys())
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


def built(model: Model) -> nn.Module:
    torch.manual_seed(0)
    return model.build()


def planned(model: Model) -> tuple[nn.Module, Plan]:
    module = built(model)
    return module, plan_model(module, model.inputs(), state=model.state)


@MODELS
def test_the_groups_are_the_hand_counted_ones(model: Model) -> None:
    module, plan = planned(model)
    assert len(plan.groups) == model.groups
    names = {n for n, t in module.state_dict().items() if t.is_floating_point()}
    assert plan.tensors.keys() <= names
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    for name, tensor in plan.tensors.items():
        assert len(tensor.axes) == len(shapes[name])
    assert not [note for note in plan.notes if "no rule" in note]
    assert plan_from_json(plan_to_json(plan)) == plan


@MODELS
def test_permuting_all_groups_leaves_the_outputs_unchanged(model: Model) -> None:
    module, plan = planned(model)
    verify_plan(module, plan, model.inputs(), rng=np.random.default_rng(1), state=model.state)


@MODELS
@pytest.mark.slow
def test_a_plan_without_any_one_axis_reference_is_refused(model: Model) -> None:
    module, plan = planned(model)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    widths = solve_widths(plan, shapes, source="model")
    for broken, group in without_one_reference(plan, widths):
        with pytest.raises(ArchitectureError, match=f"permuting .*'{group}'"):
            verify_plan(
                module,
                broken,
                model.inputs(),
                rng=np.random.default_rng(2),
                state=model.state,
                widths=widths,
            )


def without_one_reference(plan: Plan, widths: dict[str, int]) -> Iterator[tuple[Plan, str]]:
    """Yield the plan with one group pinned on one axis, for every group and axis."""
    for group in plan.groups:
        places = list(plan.axes_of(group.name))
        assert len(places) > 1, f"{group.name} stands on one axis only"
        for name, axis in places:

            def pinned(other: str, gone: str = group.name) -> Layout:
                return Pinned(widths[gone]) if other == gone else Units(other)

            tensor = plan.tensors[name]
            axes = list(tensor.axes)
            axes[axis] = replace_groups(axes[axis], pinned)
            changed = replace(tensor, axes=tuple(axes))
            broken = replace(plan, tensors={**plan.tensors, name: changed})
            inside = {g: outer for g, outer in plan.inside.items() if outer != group.name}
            yield with_inside(broken, inside), group.name


@MODELS
def test_zero_units_change_nothing_where_growth_is_claimed(model: Model) -> None:
    module, plan = planned(model)
    probed = probe_growth(
        module, plan, model.inputs(), rng=np.random.default_rng(3), state=model.state
    )
    assert sum(group.can_grow for group in probed.groups) == model.can_grow
    assert all(group.why for group in probed.groups if not group.can_grow)


def calls_of(action: Callable[[], object]) -> int:
    """Return how many Python functions an action calls, whatever else the machine does."""
    calls = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


@MODELS
def test_planning_takes_a_tenth_of_a_second_of_calls(model: Model) -> None:
    """A million calls take about a second; the most, those of a transformer, are 75,000."""
    module = built(model)

    def plan() -> None:
        plan_model(module, model.inputs(), state=model.state)

    plan()  # the first imports what torch needs
    assert 1000 < calls_of(plan) < 100_000


@pytest.mark.parametrize("name", CHAINS)
def test_plans_from_code_and_from_names_agree(name: str) -> None:
    entry = CHAINS[name]
    module = entry.fresh(1)
    expected, widths = plan_of(module.state_dict())
    if isinstance(module, nn.ModuleDict):
        module = chained(module)
    plan = plan_model(module, (entry.inputs(),))
    assert {group.name for group in plan.groups} == {group.name for group in expected.groups}
    for tensor, chain in expected.tensors.items():
        own = plan.tensors[tensor]
        assert (own.out, own.role) == (chain.out, chain.role)
        for axis, other in zip(own.axes, chain.axes, strict=True):
            assert list(groups_in(axis)) == list(groups_in(other))
            assert axis_size(axis, widths) == axis_size(other, widths)
    assert plan.norms == expected.norms
    assert set(plan.same_width) == set(expected.same_width)


def chained(parts: nn.ModuleDict) -> nn.Module:
    """Return parts as one module that keeps their names."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.children():
                x = part(x)
            return x

    return Chain().eval()
