"""Models that decide by their data or weights: planned soundly on every way, or refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture import plan_checked, solve_widths
from fedmerge.architecture.from_code import (
    Way,
    Ways,
    generic_model,
    permuted,
    plan_model,
    verify_plan,
    ways_of,
)
from fedmerge.errors import ArchitectureError
from fedmerge.values import Plan

CLOSE = 1e-9
NUMBERS = torch.arange(1.0, 7.0)
Between = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and between them what a function makes of the hidden units h and the input x."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.gate = nn.Parameter(torch.tensor(-0.5))
        self.calls: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(self.one(self.first(x)).tanh()) * (1 + self.gate.square())
        out: Tensor = self.second(self.between(self, h, x))
        return out


def numbered(h: Tensor) -> Tensor:
    """Return units times their numbers, which no permutation leaves as they are."""
    return h * NUMBERS.to(h)


def inputs_of(seed: int = 0) -> tuple[Tensor, ...]:
    return (torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)),)


def planned(net: nn.Module) -> Plan:
    """Return a net's plan, checked as the commands do."""
    torch.manual_seed(0)
    return plan_checked(net, inputs_of(), seed=0, state=())


def planned_on_one_way(net: nn.Module) -> Plan:
    """Return the plan of one run, whatever the net may do otherwise."""
    return plan_model(net, inputs_of(), ways=Ways((Way(inputs_of()),)))


def is_sound(net: Net, plan: Plan) -> bool:
    """Return whether permuted copies give the same, on inputs of all sizes and random weights."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        module = generic_model(net, torch.float64, rng=rng)
        shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        widths = solve_widths(plan, shapes, source="net")
        moves = {group: rng.permutation(width) for group, width in widths.items()}
        other = permuted(module, plan, moves, widths)
        for size in (0.0, 1e-3, 1.0, -1.0, 30.0, -1e3, 1e5):
            for shift in (0.0, 3.0, -3.0):
                x = torch.from_numpy(rng.standard_normal((2, 5))) * size + shift
                with torch.no_grad():
                    one, two = module(x), other(x)
                if not torch.allclose(one, two, rtol=CLOSE, atol=CLOSE):
                    return False
    return True


def by_exception(net: Net, h: Tensor, x: Tensor) -> Tensor:
    try:
        if x.mean() > 0:
            raise KeyError
    except KeyError:
        return numbered(h)
    return h


def by_loop(net: Net, h: Tensor, x: Tensor) -> Tensor:
    for row in x:
        if row.sum() > 2:
            h = numbered(h)
    return h


def by_count(net: Net, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(min(3, int(x.abs().sum()) % 3)):
        h = numbered(h)
    return h


def by_two(net: Net, h: Tensor, x: Tensor) -> Tensor:
    h = h.flip(0) if x.sum() > 1e4 else h
    return numbered(h) if x.std() > 1e4 else h


def nested(net: Net, h: Tensor, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return numbered(h) if x.std() > 50 else h
    return h.relu()


def early(net: Net, h: Tensor, x: Tensor) -> Tensor:
    while h.abs().max() > 2:
        h = numbered(h) / 30
    return h


UNSOUND: dict[str, Between] = {  # on one side; one run on small inputs does not show it
    "a truth": lambda net, h, x: numbered(h) if x.sum() > 1e2 else h,
    "a truth of hidden units": lambda net, h, x: numbered(h) if h.sum() > 4 else h,
    "truth of a number": lambda net, h, x: numbered(h) if (x > 50).sum() else h,
    "item": lambda net, h, x: numbered(h) if x.sum().item() > 1e2 else h,
    "float": lambda net, h, x: numbered(h) if float(x.sum()) > 1e2 else h,
    "int": lambda net, h, x: numbered(h) if int(x.sum()) > 100 else h,
    "sqrt of item": lambda net, h, x: numbered(h) if math.sqrt(x.abs().sum().item()) > 30 else h,
    "list": lambda net, h, x: numbered(h) if x.tolist()[0][0] > 100 else h,
    "equal": lambda net, h, x: numbered(h) if torch.equal(x, x.flip(0)) else h,
    "allclose": lambda net, h, x: numbered(h) if torch.allclose(x, x.flip(0)) else h,
    "nonzero": lambda net, h, x: numbered(h) if len((x > 50).nonzero()) else h,
    "masked": lambda net, h, x: numbered(h) if x[x > 50].numel() > 2 else h,
    "unique": lambda net, h, x: numbered(h) if torch.unique(x).numel() < 3 else h,
    "index": lambda net, h, x: [h, numbered(h)][int(x.sum() > 1e2)],
    "table": lambda net, h, x: {True: numbered, False: torch.relu}[bool(x.max() > 1e2)](h),
    "max": lambda net, h, x: numbered(h) if max(x.sum(), torch.tensor(50.0)) is not x.sum() else h,
    "any": lambda net, h, x: numbered(h) if (x > 1e2).any() else h,
    "not all": lambda net, h, x: numbered(h) if not (x.abs() < 1e2).all() else h,
    "a weight": lambda net, h, x: numbered(h) if net.gate > 0 else h,
    "a weight's item": lambda net, h, x: numbered(h) if net.gate.item() > 0 else h,
    "an exception": by_exception,
    "a loop": by_loop,
    "a count": by_count,
    "two": by_two,
    "nested": nested,
    "while": early,
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_branch_that_knows_units_by_number_is_seen_whichever_way_the_first_run_goes(
    name: str,
) -> None:
    torch.manual_seed(0)
    net = Net(UNSOUND[name])
    plan = planned(net)
    assert is_sound(net, plan)
    assert {group.name for group in plan.groups} <= {"first", "one"}


SHOWN = {"max", "index", "an exception", "a count", "a loop"}  # by the first run already
ONE_WAY = [name for name in UNSOUND if name not in SHOWN]


@pytest.mark.parametrize("name", ONE_WAY)
def test_a_plan_of_one_way_alone_would_be_unsound(name: str) -> None:
    torch.manual_seed(0)
    net = Net(UNSOUND[name])
    assert not is_sound(net, planned_on_one_way(net))


def logged(net: Net, h: Tensor, x: Tensor) -> Tensor:
    logging.getLogger(__name__).debug("the largest is %s", x.max().item())
    return h


def kept(net: Net, h: Tensor, x: Tensor) -> Tensor:
    net.calls.append(h.sum().item())
    return h


def printed(net: Net, h: Tensor, x: Tensor) -> Tensor:
    print(f"{x} {x.sum()} {h.mean():.3f}")
    return h


SOUND: dict[str, Between] = {  # on all sides: nothing is to be pinned
    "activations": lambda net, h, x: h.relu() if x.sum() > 0 else h.tanh(),
    "a layer": lambda net, h, x: h.relu() if h.sum() > 1e3 else h,
    "a check": lambda net, h, x: h if not h.isnan().any() else torch.nan_to_num(h),
    "a log": logged,
    "a kept number": kept,
    "a printed tensor": printed,
    "a factor": lambda net, h, x: h * x.sum().item(),
    "a factor by number": lambda net, h, x: h / max(1.0, float(h.abs().sum())),
    "shapes": lambda net, h, x: h if x.shape[0] > 1 and len(x) < 100 else numbered(h),
    "a constant": lambda net, h, x: h if torch.ones(3).sum() > 2 else numbered(h),
    "a mask of ones": lambda net, h, x: h if torch.ones_like(x).all() else numbered(h),
    "a gate": lambda net, h, x: h.relu() if net.gate > 0 else h,
}


@pytest.mark.parametrize("name", SOUND)
def test_harmless_decisions_pin_nothing(name: str) -> None:
    torch.manual_seed(0)
    net = Net(SOUND[name])
    plan = planned(net)
    assert [group.name for group in plan.groups] == ["first", "one", "two"]
    assert is_sound(net, plan)
    assert not [note for note in plan.notes if "decides" in note]


def refusing(net: Net, h: Tensor, x: Tensor) -> Tensor:
    if x.isnan().any():
        raise ValueError("no numbers")
    assert bool((x.abs() < 1e9).all()), "too large"
    torch._assert(x.sum() < 1e9, "too large")  # type: ignore[no-untyped-call]
    return h


def test_a_side_that_raises_needs_no_plan() -> None:
    plan = planned(Net(refusing))
    assert [group.name for group in plan.groups] == ["first", "one", "two"]


def test_a_side_that_can_not_be_run_is_refused_and_its_line_named() -> None:
    def fails(net: Net, h: Tensor, x: Tensor) -> Tensor:
        return h @ torch.ones(7, 7).to(h) if (x > 1e6).all() else h

    with pytest.raises(
        ArchitectureError, match=r"decides by its data or weights \(.*test_ways.py:\d+\)"
    ) as caught:
        planned(Net(fails))
    assert "where that is True can't be checked: RuntimeError" in caught.value.problem
    assert "`plan`" in caught.value.hint


def test_a_side_without_outputs_is_refused() -> None:
    def empty(net: Net, h: Tensor, x: Tensor) -> Tensor:
        return h * float("nan") if (x > 1e6).all() else h

    with pytest.raises(ArchitectureError, match="where that is True can't be checked: the plan"):
        planned(Net(empty))


def test_a_side_without_an_end_is_refused() -> None:
    def endless(net: Net, h: Tensor, x: Tensor) -> Tensor:
        while (x > 1e6).all():
            x = x + 1
            if x.sum() < 0:  # the loop's own truth is told once only
                while True:
                    x = x * 1
        return h

    with pytest.raises(ArchitectureError, match="can't be checked: StopRun: it takes no end"):
        planned(Net(endless))


class Careful(nn.Module):
    """A layer that looks at what it makes, and refuses some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.up(x).relu())
        if made.isnan().any():
            raise ValueError("not a number")
        return made.clamp(-1e9, 1e9) if made.isinf().any() else made


def test_many_layers_that_check_their_numbers_are_planned() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), *(Careful() for _ in range(20)), nn.Linear(6, 3)]
    net = nn.Sequential(*layers)
    ways = ways_of(net, inputs_of())
    assert len(ways.decisions) == 20 * 3  # both of a number that is infinite, one of no number
    assert not ways.failures
    plan = plan_model(net, inputs_of(), ways=ways)
    assert len(plan.groups) == 21
    ways.follow(lambda given: verify_plan(net, plan, given, rng=np.random.default_rng(0)))


def test_code_that_asks_the_user_finds_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    def asks(net: Net, h: Tensor, x: Tensor) -> Tensor:
        if h.isnan().any():
            input("what now? ")
        return h

    with pytest.raises(ArchitectureError, match="where that is True can't be checked: EOFError"):
        planned(Net(asks))


def test_tensors_of_either_side_are_planned() -> None:
    net = Net(lambda net, h, x: h)

    class Either(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = self.one(h).relu() if x.sum() > 1e6 else self.two(h).tanh()
            out: Tensor = self.second(h)
            return out * self.gate

    torch.manual_seed(0)
    net = Either(net.between)
    plan = planned(net)
    assert is_sound(net, plan)
    assert [group.name for group in plan.groups] == ["first", "two"]
    assert plan.tensors["one.weight"].axes == plan.tensors["two.weight"].axes


def test_what_no_way_uses_is_refused_where_numbers_decide() -> None:
    def chosen(net: Net, h: Tensor, x: Tensor) -> Tensor:
        layers = {10**k: layer for k, layer in enumerate((net.one, net.two))}
        return layers.get(int(x.sum()) + 12345, nn.Identity())(h)  # type: ignore[no-any-return]

    class Rare(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.between(self, self.first(x), x)) * self.gate
            return out

    net = Rare(chosen)
    with pytest.raises(ArchitectureError, match="is looked up in a dictionary"):
        planned(net)
    with pytest.raises(ArchitectureError, match=r"decides by its data \(.*\), and no way .*'one"):
        plan_checked(net, inputs_of(), seed=0, state=(), trusts_numbers=True)


class Rows(nn.Module):
    """A hand-written recurrent net that stops where its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 6).to(x)
        for step in range(x.shape[1]):
            if x[:, step].abs().max() < 1e-6:
                break
            state = self.cell(x[:, step], state)
        out: Tensor = self.head(state)
        return out


def test_a_loop_that_may_end_early_is_planned() -> None:
    torch.manual_seed(0)
    net, inputs = Rows(), (torch.randn(2, 12, 5),)
    plan = plan_checked(net, inputs, seed=0, state=())
    assert [group.name for group in plan.groups] == ["cell"]
    assert len(ways_of(net, inputs).all) > 2


def test_a_scripted_model_s_branches_are_seen() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if bool(x.sum() > 1e3):
                h = h * torch.arange(6)
            out: Tensor = self.second(h)
            return out

    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        net = torch.jit.script(Scripted())
    assert planned(net).groups == ()


def test_a_given_plan_is_checked_on_every_way() -> None:
    torch.manual_seed(0)
    net = Net(UNSOUND["a truth"])
    wrong = planned_on_one_way(net)
    with pytest.raises(ArchitectureError, match="permuting 'two' changes its outputs"):
        ways_of(net, inputs_of()).follow(
            lambda given: verify_plan(net, wrong, given, rng=np.random.default_rng(0))
        )


def test_a_model_that_decides_nothing_has_one_way() -> None:
    ways = ways_of(Net(lambda net, h, x: h), inputs_of())
    assert (len(ways.all), ways.decisions, ways.unseen, ways.notes) == (1, {}, ("", ""), ())
