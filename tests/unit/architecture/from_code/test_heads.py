"""Attention heads are groups of their own around the units inside them, where that is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import pin_misfits, plan_model, probe_growth, verify_plan
from fedmerge.errors import ArchitectureError
from fedmerge.values import (
    Concat,
    Group,
    Pinned,
    Plan,
    Product,
    TensorPlan,
    Units,
    replace_groups,
    with_inside,
)
from tests.model_zoo import ZOO

INPUTS = (torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)),)
Scores = Callable[[Tensor], Tensor]  # (batch, heads, tokens, tokens) → the same


class Attend(nn.Module):
    """Two heads of four units, with something done to the scores."""

    def __init__(self, change: Scores = lambda scores: scores) -> None:
        super().__init__()
        self.change = change
        self.stem, self.qkv = nn.Linear(5, 8), nn.Linear(8, 24)
        self.proj, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        scores = self.change(q @ k.transpose(-1, -2)).softmax(-1)
        out: Tensor = self.head(x + self.proj((scores @ v).transpose(1, 2).flatten(2)))
        return out


def planned(net: nn.Module) -> Plan:
    plan = plan_model(net, INPUTS)
    verify_plan(net, plan, INPUTS, rng=np.random.default_rng(0))
    return plan


def test_heads_come_before_the_units_inside_them() -> None:
    plan = planned(Attend())
    assert [group.name for group in plan.groups] == ["stem", "qkv.heads", "qkv", "qkv-2"]
    heads = "qkv.heads"
    queries, values = (Product((Units(heads), Units(g, heads))) for g in ("qkv", "qkv-2"))
    assert plan.tensors["qkv.weight"].axes[0] == Concat((queries, queries, values))
    assert plan.tensors["proj.weight"].axes[1] == values


def test_heads_with_numbers_of_their_own_in_the_code_are_pinned_and_a_note_says_by_what() -> None:
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    plan = planned(Attend(lambda scores: scores * slopes))
    assert [group.name for group in plan.groups] == ["stem", "qkv", "qkv-2"]
    queries = Product((Pinned(2, "constant"), Units("qkv")))
    axis = plan.tensors["qkv.weight"].axes[0]
    assert isinstance(axis, Concat)
    assert axis.parts[0] == queries
    assert plan.notes == ("blocks of units keep their order (constant): qkv.weight",)


def test_mixed_heads_of_one_group_are_pinned() -> None:
    mix = torch.tensor([[1.0, 0.5], [0.2, 1.0]])
    plan = planned(Attend(lambda scores: torch.einsum("gh,bhts->bgts", mix, scores)))
    assert "qkv.heads" not in [group.name for group in plan.groups]


def test_units_times_themselves_on_one_axis_are_pinned_and_a_note_says_so() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(5, 3), nn.Linear(9, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            out: Tensor = self.head((x[..., None] * x[..., None, :]).flatten(-2))
            return out

    plan = planned(Squares())
    assert plan.groups == ()
    assert plan.notes == ("'head.weight': 3 units times themselves on one axis: pinned",)


def with_free_heads(plan: Plan) -> Plan:
    """Return a plan whose pinned heads are wrongly said to be a group."""

    def freed(tensor: TensorPlan) -> TensorPlan:
        def loose(axis: Product) -> Product:
            return Product((Units("heads"), *axis.factors[1:]))

        axes = []
        for axis in tensor.axes:
            if isinstance(axis, Concat):
                axis = Concat(tuple(loose(p) for p in axis.parts if isinstance(p, Product)))
            axes.append(loose(axis) if isinstance(axis, Product) else axis)
        return replace(tensor, axes=tuple(axes))

    return replace(
        plan,
        groups=(plan.groups[0], Group("heads", False, "test", 2), *plan.groups[1:]),
        tensors={name: freed(tensor) for name, tensor in plan.tensors.items()},
    )


def test_heads_that_fail_the_check_by_numbers_are_pinned_and_named() -> None:
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    net = Attend(lambda scores: scores * slopes)
    plan = planned(net)
    wrong = with_free_heads(plan)
    with pytest.raises(ArchitectureError, match="permuting 'heads' changes its outputs"):
        verify_plan(net, wrong, INPUTS, rng=np.random.default_rng(0))
    checked = pin_misfits(net, wrong, INPUTS, rng=np.random.default_rng(0))
    assert checked.groups == plan.groups
    assert checked.notes[-1] == "'heads' is pinned: permuting it changes the outputs"
    right = planned(Attend())
    assert pin_misfits(Attend(), right, INPUTS, rng=np.random.default_rng(0)) == right


def test_a_misfit_that_is_not_around_other_units_is_refused() -> None:
    net = Attend()
    plan = planned(net)

    def pinned(group: str) -> Pinned | Units:
        return Pinned(4) if group == "qkv-2" else Units(group)

    proj = plan.tensors["proj.weight"]
    broken = replace(proj, axes=(proj.axes[0], replace_groups(proj.axes[1], pinned)))
    wrong = replace(plan, tensors={**plan.tensors, "proj.weight": broken})
    with pytest.raises(ArchitectureError, match="permuting 'qkv-2' changes"):
        pin_misfits(net, wrong, INPUTS, rng=np.random.default_rng(0))


def test_heads_grow_where_the_code_asks_for_the_units_per_head_only() -> None:
    model = ZOO["attention with growing heads"]
    torch.manual_seed(0)
    net, inputs = model.build(), model.inputs()
    plan = probe_growth(net, plan_model(net, inputs), inputs, rng=np.random.default_rng(0))
    assert plan.group("qkv.heads") == Group("qkv.heads")
    assert not plan.group("qkv").can_grow
    assert plan.group("qkv-2").width == 3  # so that the number of heads shows


def test_heads_of_pytorch_s_attention_cannot_grow_without_the_stream() -> None:
    model = ZOO["transformer encoder"]
    torch.manual_seed(0)
    net, inputs = model.build(), model.inputs()
    plan = probe_growth(net, plan_model(net, inputs), inputs, rng=np.random.default_rng(0))
    heads = plan.group("layer.self_attn.in_proj.heads")
    assert (heads.can_grow, heads.width) == (False, 2)
    assert "sizes [3, 8] don't multiply up to" in heads.why
    assert plan.group("layer.linear1").can_grow


def test_learned_keys_and_values_belong_to_the_heads() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
            self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            out: Tensor = self.head(self.attention(x, x, x)[0])
            return out

    plan = planned(Biased())
    heads = Units("attention.in_proj.heads")
    for name, group in (("bias_k", "attention.in_proj"), ("bias_v", "attention.in_proj-2")):
        expected = Product((heads, Units(group, heads.group)))
        assert plan.tensors[f"attention.{name}"].axes[2] == expected


Mix = Callable[[Tensor, Tensor], Tensor]  # queries and what heads saw (batch, heads, tokens, units)


class Mixed(nn.Module):
    """Two heads of four units; something is done to what they saw."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix
        self.stem, self.qkv = nn.Linear(5, 8), nn.Linear(8, 24)
        self.proj, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.across = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        seen = self.mix(q, seen) + 0 * self.across.sum()
        out: Tensor = self.head(x + self.proj(seen.transpose(1, 2).flatten(2)))
        return out


def of_heads_among_themselves(q: Tensor, seen: Tensor) -> Tensor:
    """Let every head of a token look at the others by their queries."""
    q = q.transpose(1, 2)
    return seen + (q @ q.transpose(-1, -2)).sum((-1, -2))[:, None, :, None]


ALIKE: dict[str, tuple[Mix, set[str]]] = {  # and the groups that need one order for all heads
    "nothing": (lambda q, seen: seen, set()),
    "their mean added": (lambda q, seen: seen + seen.mean(1, keepdim=True), {"qkv-2"}),
    "heads mixed": (lambda q, seen: seen + seen.flip(1), {"qkv-2"}),
    "heads compared": (of_heads_among_themselves, {"qkv"}),
    "units compared": (lambda q, seen: seen.softmax(-1), set()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_units_have_orders_of_their_own_in_heads_that_keep_to_themselves(name: str) -> None:
    mix, alike = ALIKE[name]
    net = Mixed(mix)
    plan = planned(net)
    heads = [group.name for group in plan.groups if group.name.endswith("heads")]
    expected = {"qkv": "qkv.heads", "qkv-2": "qkv.heads"} if heads else {}
    assert plan.inside == {group: o for group, o in expected.items() if group not in alike}
    if heads and alike:
        wrong = with_inside(plan, expected)
        [group] = alike
        with pytest.raises(ArchitectureError, match=f"permuting '{group}' changes its outputs"):
            verify_plan(net, wrong, INPUTS, rng=np.random.default_rng(0))
        assert pin_misfits(net, wrong, INPUTS, rng=np.random.default_rng(0)) == plan


def test_a_product_over_heads_gives_their_units_one_order() -> None:
    class Talking(Mixed):
        """Heads that hear each other by a learned matrix, beside themselves."""

        def forward(self, x: Tensor) -> Tensor:
            self.mix = lambda q, seen: seen + torch.einsum("gh,bhtd->bgtd", self.across, seen)
            return super().forward(x)

    net = Talking(lambda q, seen: seen)
    plan = planned(net)
    assert plan.inside == {"qkv": "qkv.heads"}
    both = {"qkv": "qkv.heads", "qkv-2": "qkv.heads"}
    with pytest.raises(ArchitectureError, match="permuting 'qkv-2' changes its outputs"):
        verify_plan(net, with_inside(plan, both), INPUTS, rng=np.random.default_rng(0))


def test_units_of_a_head_that_are_compared_with_each_other_keep_its_order() -> None:
    plan = planned(Mixed(lambda q, seen: seen @ (q.transpose(-1, -2) @ q).softmax(-1)))
    assert plan.inside == {"qkv": "qkv.heads"}  # one group: queries, keys and values mix


def test_a_norm_that_all_heads_share_gives_their_units_one_order() -> None:
    class Normed(Mixed):
        def __init__(self) -> None:
            super().__init__(lambda q, seen: self.norm(seen))
            self.norm = nn.RMSNorm(4)

    assert planned(Normed()).inside == {"qkv": "qkv.heads"}


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("transformer encoder", {"layer.self_attn.in_proj", "layer.self_attn.in_proj-2"}),
        ("cross attention", {"attention.in_proj", "attention.in_proj-2"}),
        ("attention that counts its heads", {"attention.q", "attention.v"}),
        ("attention with growing heads", {"qkv", "qkv-2"}),
        ("llama", {"q.heads-2", "v"}),  # the queries of a key, values; rotation pins the rest
    ],
)
def test_groups_with_orders_of_their_own_in_every_head(name: str, inner: set[str]) -> None:
    model = ZOO[name]
    torch.manual_seed(0)
    net = model.build()
    plan = plan_model(net, model.inputs())
    assert set(plan.inside) == inner
    verify_plan(net, plan, model.inputs(), rng=np.random.default_rng(0))
