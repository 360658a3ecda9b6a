"""Models that are hard to follow: the plan is sound, or refused, never wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import plan_model, probe_growth, verify_plan, ways_of
from fedmerge.errors import ArchitectureError
from fedmerge.values import OUTPUT, Pinned, Plan, Units, groups_in


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor], **tensors: Tensor) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.other = nn.Linear(6, 6)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self, self.first(x)))
        return out


def planned(net: nn.Module, *shapes: tuple[int, ...]) -> Plan:
    """Return a net's plan, verified."""
    torch.manual_seed(0)
    inputs = tuple(torch.randn(shape) for shape in shapes or ((2, 5),))
    plan = plan_model(net, inputs)
    verify_plan(net, plan, inputs, rng=np.random.default_rng(0))
    return plan


def groups(net: nn.Module) -> list[str]:
    return [group.name for group in planned(net).groups]


def branch_by_sum(net: Net, x: Tensor) -> Tensor:
    return net.other(x).relu() if x.sum() > 1e9 else net.other(x).tanh()  # type: ignore[no-any-return]


def test_a_branch_by_a_sum_is_followed_where_both_sides_use_all_tensors() -> None:
    assert groups(Net(branch_by_sum)) == ["first", "other"]


def test_tensors_of_a_branch_that_the_inputs_do_not_take_are_planned_too() -> None:
    net = Net(lambda net, x: net.other(x) if x.sum() > 1e9 else x)
    plan = planned(net)
    assert [group.name for group in plan.groups] == ["first"]
    assert plan.tensors["other.weight"].axes == (Units("first"), Units("first"))


def test_a_number_taken_from_one_unit_pins_the_units() -> None:
    net = Net(lambda net, x: net.other(x) * x[0, 0].item())
    assert groups(net) == ["other"]


def test_a_number_taken_from_all_units_pins_nothing() -> None:
    assert groups(Net(lambda net, x: net.other(x) * x.sum().item())) == ["first", "other"]


def test_data_that_comes_back_from_numpy_is_pinned() -> None:
    def between(net: Net, x: Tensor) -> Tensor:
        values = x.numpy()
        back = torch.from_numpy(values * np.arange(6, dtype=values.dtype))
        made: Tensor = net.other(back)
        return made

    net, inputs = Net(between), (torch.randn(2, 5),)
    with pytest.raises(ArchitectureError, match="becomes numpy's"):
        planned(net)
    plan = plan_model(net, inputs, ways=ways_of(net, inputs, trusts_numbers=True))
    assert [group.name for group in plan.groups] == ["other"]


def test_data_that_comes_back_from_a_list_is_pinned() -> None:
    net = Net(lambda net, x: net.other(torch.tensor(x.tolist())))
    assert groups(net) == ["other"]


def test_unused_tensors_are_pinned_and_noted() -> None:
    plan = planned(Net(lambda net, x: x.relu()))
    assert [group.name for group in plan.groups] == ["first"]
    assert plan.tensors["other.weight"].axes == (Pinned(6, "unused"), Pinned(6, "unused"))
    assert plan.notes == ("'other.weight', 'other.bias' are not used in the forward pass: pinned",)


def test_buffers_follow_the_units_that_they_scale() -> None:
    net = Net(lambda net, x: net.other(x * net.get_buffer("scale")), scale=torch.rand(6))
    plan = planned(net)
    assert plan.tensors["scale"].axes == (Units("first"),)
    assert plan.tensors["scale"].role == "pointwise"


def test_a_constant_of_the_code_pins_what_it_meets() -> None:
    constant = torch.randn(6)
    assert groups(Net(lambda net, x: net.other(x) + constant)) == ["first"]


def test_a_constant_that_is_the_same_for_all_units_pins_nothing() -> None:
    net = Net(lambda net, x: net.other(x) + torch.full((6,), 0.5) * torch.ones(2, 6))
    assert groups(net) == ["first", "other"]


def test_a_constant_changed_in_place_at_one_unit_pins_them() -> None:
    def between(net: Net, x: Tensor) -> Tensor:
        scale = torch.ones(6)
        scale[2] = 3.0
        made: Tensor = net.other(x) * scale
        return made

    assert groups(Net(between)) == ["first"]


def test_a_read_before_a_write_puts_no_constraint() -> None:
    def between(net: Net, x: Tensor) -> Tensor:
        scale = torch.ones(6)
        x = x * scale
        scale[2] = 3.0
        made: Tensor = net.other(x) * scale
        return made

    assert groups(Net(between)) == ["first"]


def test_a_buffer_filled_half_by_half_carries_both_halves() -> None:
    def between(net: Net, x: Tensor) -> Tensor:
        both = x.new_zeros(len(x), 12)
        both[:, :6] = x
        both[:, 6:] = net.other(x)
        return both[:, :6] * both[:, 6:].sigmoid()

    assert groups(Net(between)) == ["first"]


def test_parameters_used_twice_tie_both_uses() -> None:
    net = Net(lambda net, x: net.other(net.other(x).tanh()))
    plan = planned(net)
    assert [group.name for group in plan.groups] == ["first"]
    assert plan.tensors["other.weight"].axes == (Units("first"), Units("first"))
    assert plan.tensors["other.weight"].role == "recurrent"


def test_rows_beyond_the_length_of_the_inputs_are_pinned() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.head = nn.Parameter(torch.randn(9, 5)), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head((x + self.places[: x.shape[1]]).tanh())
            return out

    plan = planned(Places(), (2, 4, 5))
    assert not plan.groups
    assert not list(groups_in(plan.tensors["places"].axes[0]))


def test_an_op_without_a_rule_pins_all_and_is_reported() -> None:
    net = Net(lambda net, x: torch.linalg.matrix_exp(net.other(x).T @ x)[:2])
    plan = planned(net)
    assert not plan.groups
    assert any("linalg_matrix_exp" in note and "no rule" in note for note in plan.notes)


def test_a_maximum_s_indices_pin_only_if_they_are_used() -> None:
    unused = Net(lambda net, x: net.other(x) + x.max(-1, keepdim=True).values)
    assert groups(unused) == ["first", "other"]
    used = Net(lambda net, x: net.other(x) + x.max(-1, keepdim=True).indices)
    assert groups(used) == ["other"]


@pytest.mark.parametrize(
    "op", ["cumsum", "sort", "topk", "argmax", "flip", "roll", "index", "triu"]
)
def test_ops_that_know_a_unit_s_number_pin_the_units(op: str) -> None:
    ops: dict[str, Callable[[Tensor], Tensor]] = {
        "cumsum": lambda x: x.cumsum(-1),
        "sort": lambda x: x.sort(-1).values,
        "topk": lambda x: x.topk(6).values,
        "argmax": lambda x: x + x.argmax(-1, keepdim=True),
        "flip": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(1, -1),
        "index": lambda x: x[:, torch.tensor([0, 2, 1, 3, 4, 5])],
        "triu": lambda x: x.triu(),
    }
    assert groups(Net(lambda net, x: net.other(ops[op](x)))) == ["other"]


@pytest.mark.parametrize("change", ["data", "detach", "clone", "float", "out"])
def test_copies_and_aliases_carry_units(change: str) -> None:
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "data": lambda x: x.data,
        "detach": lambda x: x.detach(),
        "clone": lambda x: x.clone(),
        "float": lambda x: x.double().to(x.dtype),
        "out": lambda x: torch.exp(x, out=torch.empty_like(x)),
    }
    assert groups(Net(lambda net, x: net.other(changes[change](x)))) == ["first", "other"]


def test_a_model_that_computes_in_single_precision_is_verified_at_its_precision() -> None:
    net = Net(lambda net, x: net.other(x.float().softmax(-1).to(x.dtype)))
    assert groups(net) == ["first", "other"]


def test_a_random_model_is_refused() -> None:
    with pytest.raises(ArchitectureError, match="other outputs each time"):
        planned(Net(lambda net, x: net.other(x) + torch.rand(2, 1)))


def test_a_model_that_fails_says_why_and_on_what() -> None:
    with pytest.raises(ArchitectureError, match=r"does not run on inputs of shape \(2, 4\)"):
        planned(Net(lambda net, x: x), (2, 4))


def test_the_output_is_pinned_as_such() -> None:
    plan = planned(Net(lambda net, x: net.other(x)))
    assert plan.tensors["second.weight"].axes[0] == Pinned(3, OUTPUT)
    assert plan.tensors["second.weight"].makes_outputs


def test_scripted_modules_are_followed() -> None:
    from tests.model_zoo_convolution import LeNet
    from tests.model_zoo_recurrent import HandWritten

    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted: list[tuple[Any, tuple[int, ...], int]] = [
            (torch.jit.script(LeNet()), (2, 1, 14, 14), 3),
            (torch.jit.script(HandWritten()), (2, 4, 5), 1),
        ]
    for net, shape, count in scripted:
        assert len(planned(net, shape).groups) == count


def test_growth_names_its_obstacle() -> None:
    from tests.model_zoo import HardCodedView

    net = HardCodedView()
    inputs = (torch.randn(2, 1, 8, 8),)
    plan = probe_growth(net, plan_model(net, inputs), inputs, rng=np.random.default_rng(0))
    assert not plan.group("conv2").can_grow
    assert "does not run" in plan.group("conv2").why
    assert plan.group("fc1").can_grow


def test_groups_of_one_number_in_the_code_grow_together() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = 6
            self.one, self.two = nn.LSTMCell(5, 6), nn.LSTMCell(6, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = [torch.zeros(len(x), self.hidden) for _ in range(4)]
            first = self.one(x, (state[0], state[1]))
            second = self.two(first[0], (state[2], state[3]))
            out: Tensor = self.head(second[0])
            return out

    net, inputs = Two(), (torch.randn(2, 5),)
    plan = probe_growth(net, plan_model(net, inputs), inputs, rng=np.random.default_rng(0))
    assert [group.can_grow for group in plan.groups] == [True, True]
    assert plan.same_width == (("one", "two"),)


def test_a_norm_after_an_in_place_activation_does_not_follow_its_producer() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.BatchNorm2d(4))
    plan = planned(nn.Sequential(layers, nn.Conv2d(4, 2, 1)), (2, 3, 4, 4))
    assert [group.name for group in plan.groups] == ["0.0"]
    assert plan.norms == ()


def test_scattered_units_are_pinned_and_the_others_carried_on() -> None:
    def between(net: Net, x: Tensor) -> Tensor:
        made: Tensor = net.other(x)
        return torch.zeros_like(made).scatter_add_(0, torch.ones_like(made).long(), made)

    plan = planned(Net(between))
    assert [group.name for group in plan.groups] == ["first", "other"]


def test_a_custom_op_of_a_known_name_is_unknown() -> None:
    with torch.library._scoped_library("fedmerge_test", "FRAGMENT") as library:
        library.define("add(Tensor x) -> Tensor")
        library.impl("add", lambda x: x.cumsum(-1), "CPU")
        plan = planned(Net(lambda net, x: net.other(torch.ops.fedmerge_test.add(x))))
    assert [group.name for group in plan.groups] == ["other"]
    assert "the op 'fedmerge_test::add' has no rule: all that it touches is pinned" in plan.notes


def test_a_bias_that_only_scales_is_pointwise_and_one_that_adds_is_a_weight() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Parameter(torch.randn(5, 6)), nn.Linear(6, 3)
            self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(((x @ self.first) * self.scale + self.shift).relu())
            return out

    plan = planned(Own())
    roles = {name: (tensor.out, tensor.role) for name, tensor in plan.tensors.items()}
    assert roles["first"] == (1, "weight")
    assert roles["scale"] == (0, "pointwise")
    assert roles["shift"] == (0, "weight")
    assert [group.name for group in plan.groups] == ["first"]
