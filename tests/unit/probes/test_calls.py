"""What is told of a model's run: every use of a whole weight, exactly, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fedmerge.probes import Call, LayerCall, names_of, run_heard
from fedmerge.user_code import StopRun

CLOSE = 1e-12  # float64, sums of a few dozen products


class Product(nn.Module):
    """A weight used as a function says."""

    def __init__(self, use: Callable[[Tensor, nn.Parameter, nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight, self.bias)


class OddLinear(nn.Module):
    """A linear layer that reads every other step, in turned order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(0, 1)[::2])
        return out


def heard(model: nn.Module, x: Tensor) -> tuple[list[Call], Tensor]:
    """Return the calls of a run in float64, and its outputs."""
    calls: list[Call] = []
    model = model.double().eval()
    outputs = run_heard(model, (x,), calls.append).outputs
    assert isinstance(outputs, Tensor)
    return calls, outputs


def remade(call: LayerCall, model: nn.Module) -> Tensor:
    """Return patches · weightᵀ + bias."""
    state = model.state_dict()
    weight = state[call.weight].movedim(call.out_axis, 0).flatten(1)
    bias = 0.0 if call.bias is None else state[call.bias]
    made: Tensor = call.patches(torch.arange(len(call.outputs))) @ weight.T + bias
    return made


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear on one sample": (lambda: nn.Linear(5, 3), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "linear on sequences": (lambda: nn.Linear(5, 3), (4, 6, 5)),
    "linear on turned sequences": (OddLinear, (4, 6, 5)),
    "x @ weight": (lambda: Product(lambda x, w, _: x @ w), (4, 5)),
    "addmm": (lambda: Product(lambda x, w, b: torch.addmm(b, x, w)), (4, 5)),
    "functional.linear, turned": (
        lambda: Product(lambda x, w, b: functional.linear(x, w.T, b)),
        (4, 5),
    ),
    "conv 1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (4, 2, 9)),
    "conv 2d": (lambda: nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0), (1, 2)), (4, 2, 7, 8)),
    "conv 2d, padding same": (lambda: nn.Conv2d(2, 3, 4, padding="same", bias=False), (2, 2, 6, 6)),
    "conv 3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, dilation=2), (2, 2, 4, 5, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("name", list(LAYERS))
def test_patches_times_the_weight_and_the_bias_are_the_outputs(name: str) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    model, x = build(), torch.randn(shape, dtype=torch.float64)
    (call,), outputs = heard(model, x)
    assert isinstance(call, LayerCall)
    assert torch.equal(outputs, model(x))
    assert torch.allclose(remade(call, model), call.outputs, rtol=0, atol=CLOSE)
    assert call.size == model.state_dict()[call.weight].numel()
    assert call.outputs.numel() == outputs.numel()
    model.state_dict()[call.weight].mul_(1.1)
    assert not torch.allclose(remade(call, model), call.outputs, rtol=0, atol=1e-3)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count products and convolutions."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "convolution")
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_calls_told_ahead_are_made_once_with_the_weights_of_then(name: str, is_ahead: bool) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    model, x = build().double().eval(), torch.randn(shape, dtype=torch.float64)
    as_it_was = model(x)
    told: list[Call] = []

    def double(call: Call) -> None:
        told.append(call)
        model.state_dict()[names_of(call)[0]].mul_(2)

    with Products() as products:  # type: ignore[no-untyped-call]
        outputs = run_heard(model, (x,), double, is_ahead=is_ahead).outputs
    (call,) = told
    assert isinstance(call, LayerCall)
    assert products.count == 1
    assert call.outputs.shape == (0 if is_ahead else outputs.numel() // 3, 3)
    assert torch.equal(outputs, model(x) if is_ahead else as_it_was)
    assert not torch.equal(as_it_was, model(x))


UNTOLD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "grouped conv": (lambda: nn.Conv2d(4, 4, 3, groups=2), (2, 4, 6, 6)),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 2, 3), (2, 4, 6, 6)),
    "part of a weight": (lambda: Product(lambda x, w, _: x @ w[:, :2]), (4, 5)),
    "other shape": (lambda: Product(lambda x, w, _: x @ w.view(3, 5).T), (4, 5)),
    "times two": (lambda: Product(lambda x, w, _: x @ (2 * w)), (4, 5)),
    "addmm times two": (lambda: Product(lambda x, w, b: torch.addmm(b, x, w, alpha=2)), (4, 5)),
    "addmm of no parameter": (
        lambda: Product(lambda x, w, b: torch.addmm(b.expand(4, 3).contiguous(), x, w)),
        (4, 5),
    ),
    "bias made from a parameter": (
        lambda: Product(lambda x, w, b: functional.linear(x, w.T, 2 * b)),
        (4, 5),
    ),
}


@pytest.mark.parametrize("name", list(UNTOLD))
def test_other_uses_of_weights_are_not_told(name: str) -> None:
    build, shape = UNTOLD[name]
    model, x = build(), torch.randn(shape, dtype=torch.float64)
    calls, outputs = heard(model, x)
    assert calls == []
    assert torch.equal(outputs, model(x))


def test_weights_that_are_parts_of_one_storage_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    flat = torch.randn(32, dtype=torch.float64)
    for k, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[16 * k : 16 * k + 16].view(4, 4))
    calls, _ = heard(model, torch.randn(3, 4, dtype=torch.float64))
    assert [names_of(call) for call in calls] == [("0.weight",), ("1.weight",)]


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too, and a layer of which a part is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.once = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.rnn = nn.GRU(4, 4)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.rnn(self.once(self.tokens(tokens)))
        out: Tensor = self.head(self.body(x) @ self.body.weight[1:].mT @ self.body.weight[:3])
        return out


def test_every_use_of_a_weight_is_counted_told_or_not() -> None:
    calls: list[Call] = []
    model = Tied()
    uses = run_heard(model, (torch.arange(6).view(2, 3),), calls.append).uses
    assert [names_of(call)[0] for call in calls] == [
        *("once.weight", "rnn.weight_ih_l0", "body.weight", "tokens.weight")
    ]
    assert uses["once.weight"] == uses["rnn.weight_ih_l0"] == uses["rnn.weight_hh_l0"] == 1
    assert uses["tokens.weight"] == 2
    assert uses["body.weight"] == 3


def test_who_hears_may_end_the_run() -> None:
    ran: list[str] = []

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran.append("late")
            return x

    def hear(call: Call) -> None:
        assert names_of(call) == ("0.weight",)
        raise StopRun

    model = nn.Sequential(nn.Linear(4, 4), Late(), nn.Linear(4, 2))
    run_heard(model, (torch.randn(2, 4),), hear)
    assert ran == []
    model(torch.randn(2, 4))
    assert ran == ["late"]


@pytest.mark.parametrize("is_batch_first", [False, True])
def test_attention_runs_as_before_and_its_last_layer_is_told(is_batch_first: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=is_batch_first).double().eval()
    x = torch.randn(3, 3, 8, dtype=torch.float64)
    calls: list[Call] = []
    outputs, _ = run_heard(attention, (x, x, x), calls.append).outputs
    assert torch.allclose(outputs, attention(x, x, x)[0], rtol=0, atol=CLOSE)
    names = {names_of(call)[0] for call in calls}
    assert names <= {"in_proj_weight", "out_proj.weight"}
    for call in calls:
        assert isinstance(call, LayerCall)
        assert torch.allclose(remade(call, attention), call.outputs, rtol=0, atol=CLOSE)


def test_what_is_computed_while_hearing_is_not_told() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    told: list[str] = []

    def hear(call: Call) -> None:
        told.extend(names_of(call))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.ones(5, parameter.shape[1]) @ parameter.T

    uses = run_heard(model, (torch.ones(2, 4),), hear).uses
    assert told == ["0.weight", "2.weight"]
    assert [uses["0.weight"], uses["2.weight"]] == [1, 1]
