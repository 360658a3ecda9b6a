"""Models with branches and loops in the graph, and compiled ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import dispatch, plan_model, verify_plan, ways_of
from fedmerge.errors import ArchitectureError
from fedmerge.values import Plan, Units

LOOPS: Any = torch._higher_order_ops
INPUT = (torch.linspace(-1, 1, 8).reshape(2, 4),)


class Steps(nn.Module):
    """A stem, something in the middle, a head."""

    def __init__(self, middle: Callable[[Steps, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.middle = nn.Linear(6, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self, self.stem(x).relu()))
        return out


def either_layer(net: Steps, x: Tensor) -> Any:
    return torch.cond(x.sum() > 1e9, lambda x: net.one(x).tanh(), lambda x: net.two(x).relu(), (x,))


def layer_or_nothing(net: Steps, x: Tensor) -> Any:
    return torch.cond(x.sum() < 1e9, lambda x: net.two(net.one(x)), lambda x: x + 0, (x,))


def nested(net: Steps, x: Tensor) -> Any:
    def inner(x: Tensor) -> Any:
        return torch.cond(x.sum() < 1e9, lambda x: net.one(x), lambda x: net.two(x), (x,))

    return torch.cond(x.sum() > 1e9, inner, lambda x: x.sin(), (x,))


def repeated(net: Steps, x: Tensor) -> Any:
    def body(step: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return step + 1, net.two(net.one(x).tanh())

    return LOOPS.while_loop(lambda step, x: step < 3, body, (torch.tensor(0), x))[1]


def never_repeated(net: Steps, x: Tensor) -> Any:
    def body(step: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return step + 1, net.two(net.one(x).tanh())

    return LOOPS.while_loop(lambda step, x: step < 0, body, (torch.tensor(0), x))[1]


def scanned(net: Steps, x: Tensor) -> Any:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state = (net.one(x) + net.two(state)).tanh()
        return state, state.clone()

    return LOOPS.scan(step, torch.zeros_like(x), torch.stack([x, x, x]))[0]


def mapped(net: Steps, x: Tensor) -> Any:
    return LOOPS.map(lambda row: net.two(net.one(row).relu()), x)


CASES: dict[str, tuple[Callable[[Steps, Tensor], Any], int, int]] = {  # groups, ways through
    "either layer": (either_layer, 2, 2),
    "layer or nothing": (layer_or_nothing, 2, 2),
    "nested": (nested, 1, 2),
    "while loop": (repeated, 2, 1),
    "while loop of no step": (never_repeated, 2, 1),
    "scan": (scanned, 2, 1),
    "map": (mapped, 3, 1),
}


def checked(model: nn.Module, plan: Plan) -> int:
    """Verify a plan on every way through a model, and return how many there are."""
    ways = ways_of(model, INPUT)
    ways.follow(lambda given: verify_plan(model, plan, given, rng=np.random.default_rng(0)))
    return len(ways.all)


@pytest.mark.parametrize("name", CASES)
def test_all_ways_through_a_model_are_planned_and_checked(name: str) -> None:
    middle, groups, ways = CASES[name]
    model = Steps(middle)
    plan = plan_model(model, INPUT)
    assert len(plan.groups) == groups
    assert plan.notes == ()
    assert checked(model, plan) == ways


def test_the_branch_that_was_not_taken_ties_its_units() -> None:
    model = Steps(layer_or_nothing)
    plan = plan_model(model, INPUT)
    (stem,) = plan.tensors["stem.weight"].produces
    assert plan.tensors["two.weight"].axes[0] == Units(stem)  # only the untaken branch says so


def test_a_plan_that_only_the_taken_branch_allows_is_refused_on_the_other() -> None:
    taken_only = Steps(lambda net, x: net.two(net.one(x)))
    wrong = plan_model(taken_only, INPUT)
    assert len(wrong.groups) == 3
    model = Steps(layer_or_nothing)
    first, second = ways_of(model, INPUT).all
    with first.taken():
        verify_plan(model, wrong, INPUT, rng=np.random.default_rng(0))
    with (
        second.taken(),
        pytest.raises(ArchitectureError, match=r"permuting .* changes its outputs"),
    ):
        verify_plan(model, wrong, INPUT, rng=np.random.default_rng(0))


def test_a_loop_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_STEPS", 100)

    def endless(net: Steps, x: Tensor) -> Any:
        return LOOPS.while_loop(lambda x: x.sum() < 1e30, lambda x: (x * 1,), (x,))[0]

    with pytest.raises(ArchitectureError, match="a while_loop takes more than 100 steps"):
        plan_model(Steps(endless), INPUT)


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


@pytest.mark.parametrize("how", ["vmap", "functional_call", "checkpoint", "grad", "compile"])
def test_what_wraps_a_model_does_not_hide_it(how: str) -> None:
    def layer(net: Steps, x: Tensor) -> Any:
        if how == "vmap":
            return torch.vmap(lambda row: net.two(net.one(row).tanh()))(x)
        if how == "functional_call":
            own: dict[str, Tensor] = dict(net.one.named_parameters())
            return net.two(torch.func.functional_call(net.one, own, (x,)).tanh())
        if how == "checkpoint":
            from torch.utils.checkpoint import checkpoint

            return net.two(checkpoint(net.one, x, use_reentrant=False).tanh())
        if how == "grad":
            return torch.func.grad(lambda x: net.two(net.one(x).tanh()).sum())(x)
        return net.two(net.one(x).tanh())

    model: nn.Module = Steps(layer)
    if how == "compile":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = compiled(model)
    plan = plan_model(model, INPUT)
    assert len(plan.groups) == 3
    assert checked(model, plan) == 1


def test_watching_compiles_nothing() -> None:
    from torch._dynamo.utils import counters

    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model = compiled(plain)
    before = dict(counters["frames"])
    assert [group.name for group in plan_model(model, INPUT).groups] == ["_orig_mod.0"]
    assert dict(counters["frames"]) == before
