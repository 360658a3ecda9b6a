"""Code that real models hold: what each of its ops ties, and what it must not pin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.nn.utils import parametrizations, prune

from fedmerge.architecture import solve_widths
from fedmerge.architecture.from_code import lowest_precision, plan_model, verify_plan
from fedmerge.errors import ArchitectureError
from fedmerge.values import Pinned, Plan
from tests.unit.architecture.from_code.test_zoo import without_one_reference


class GroupedQueries(nn.Module):
    """Four heads of queries that share two heads of keys and values, turned by position."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 12), nn.Linear(6, 6), nn.Linear(6, 10)
        self.out = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 3).transpose(1, 2) * torch.arange(1.0, 4.0)
        k, v = (p(x).view(b, t, 2, -1).transpose(1, 2) for p in (self.k, self.v))
        seen = fn.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.out(seen.transpose(1, 2).reshape(b, t, -1))
        return out


class WordKernels(nn.Module):
    """Convolutions over whole word vectors: a kernel as wide as what it reads."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.words, self.conv = nn.Linear(5, 6), nn.Conv2d(1, 4, (2, 6), padding=(0, padding))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(self.words(x).unsqueeze(1)).relu()
        out: Tensor = self.head(seen.amax((2, 3)))
        return out


class InnerStack(nn.Module):
    """Queries, keys and values interleaved head by head: heads × 3 × units."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(5, 2 * 3 * 4), nn.Linear(8, 3)
        self.slopes = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        fused = self.qkv(x).view(b, t, 2, 3, 4)
        q, k, v = (fused[..., part, :].transpose(1, 2) for part in range(3))
        scores = q @ k.transpose(-2, -1) * torch.tensor([1.0, 2.0]).view(2, 1, 1)
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, 8))
        return out


class Experts(nn.Module):
    """Rows sorted by expert, each run multiplied by its expert's matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.up = nn.Parameter(torch.randn(2, 8, 16))
        self.down = nn.Parameter(torch.randn(2, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 4], dtype=torch.int32)
        x = self.stem(x)
        made = fn.grouped_mm(fn.grouped_mm(x, self.up, offs=ends).relu(), self.down, offs=ends)
        out: Tensor = self.head(x + made)
        return out


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)))
        return out


def pooled_last(x: Tensor) -> Tensor:
    """Pool steps of a channels-last sequence, whose result has other strides than usual."""
    return fn.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1)


def shaped_like(x: Tensor) -> Tensor:
    """Use one unit's shape only."""
    return x + torch.ones(x[..., -1].shape).unsqueeze(-1)


def hooked(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a net whose second layer computes its weight from other tensors."""
    return nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), wrap(nn.Linear(6, 7)), nn.Tanh(), nn.Linear(7, 3)
    )


def pruned(layer: nn.Module) -> nn.Module:
    made: nn.Module = prune.random_unstructured(layer, "weight", 0.3)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True)
class Case:
    """A model and its groups' widths by name."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    groups: dict[str, int]


ROWS, STEPS = (4, 5), (2, 4, 5)
CASES = {
    "grouped queries": Case(GroupedQueries, (2, 4, 6), {"v": 5}),
    "a kernel over whole words": Case(WordKernels, STEPS, {"words": 6, "conv": 4}),
    "queries, keys and values by head": Case(InnerStack, STEPS, {"qkv": 4, "qkv-2": 4}),
    "experts": Case(Experts, ROWS, {"stem": 8, "up": 16}),
    "a number to the power of units": Case(lambda: Between(lambda x: 2.0**x), ROWS, {"first": 6}),
    "pooled steps": Case(lambda: Between(pooled_last), STEPS, {"first": 6}),
    "the shape of one unit": Case(lambda: Between(shaped_like), ROWS, {"first": 6}),
    "a pruned layer": Case(lambda: hooked(pruned), ROWS, {"0": 6, "2": 7}),
    "weight norm by hooks": Case(
        lambda: hooked(nn.utils.weight_norm), ROWS, {"0": 6, "2.weight_v": 7}
    ),
    "spectral norm": Case(lambda: hooked(parametrizations.spectral_norm), ROWS, {"0": 6, "2": 7}),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def planned(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> tuple[nn.Module, Plan, Tensor]:
    """Return a model in evaluation mode, its plan and its input."""
    torch.manual_seed(0)
    model, inputs = build().eval(), torch.randn(shape)
    return model, plan_model(model, (inputs,)), inputs


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_units_go_through_and_any_missing_reference_is_noticed(case: Case) -> None:
    model, plan, inputs = planned(case.build, case.shape)
    assert not [note for note in plan.notes if "no rule" in note]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    widths = solve_widths(plan, shapes, source="model")
    assert {group: widths[group] for group in widths if group in case.groups} == case.groups
    verify_plan(model, plan, (inputs,), rng=np.random.default_rng(1))
    for broken, group in without_one_reference(plan, widths):
        if group in case.groups:
            with pytest.raises(ArchitectureError, match=f"permuting .*'{group}'"):
                verify_plan(model, broken, (inputs,), rng=np.random.default_rng(2), widths=widths)


def test_a_padded_kernel_pins_what_it_slides_over() -> None:
    _, plan, _ = planned(lambda: WordKernels(padding=1), STEPS)
    assert plan.tensors["words.weight"].axes[0] == Pinned(6, "pixels")


def test_a_unit_that_is_read_by_its_number_pins_the_units() -> None:
    _, plan, _ = planned(lambda: Between(lambda x: x + x.select(1, 0).tanh()[:, None]), ROWS)
    assert plan.tensors["first.weight"].axes[0] == Pinned(6, "select")


def test_other_strides_are_unknown_and_pin() -> None:
    _, plan, _ = planned(lambda: Between(lambda x: x.as_strided(x.shape, (1, 4))), ROWS)
    assert not plan.groups
    assert any("as_strided" in note and "no rule" in note for note in plan.notes)


def test_what_runs_in_double_precision_is_checked_in_it() -> None:
    single = Between(lambda x: x.float().tanh().to(x.dtype))
    inputs = (torch.randn(ROWS),)
    assert lowest_precision(Between(torch.tanh), inputs) == torch.float64
    assert lowest_precision(single, inputs) == torch.float32
