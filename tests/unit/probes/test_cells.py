"""Recurrent stacks run layer by layer: the same outputs, and every cell's states and gates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmerge.probes import Call, CellCall, names_of, run_heard

CLOSE = 1e-12
KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
SETTINGS = list(itertools.product(KINDS, [1, 2], [False, True], [False, True], [False, True]))


def heard(model: nn.Module, x: Tensor) -> tuple[list[CellCall], Any]:
    calls: list[Call] = []
    outputs = run_heard(model, (x,), calls.append).outputs
    assert all(isinstance(call, CellCall) for call in calls)
    return [call for call in calls if isinstance(call, CellCall)], outputs


def stepped(call: CellCall) -> Tensor:
    """Return the states (steps, samples, hidden) by the formulas of torch's documentation."""
    hidden = call.states[0]
    cell, made = torch.zeros_like(hidden), []
    rows = torch.arange(call.inputs.shape[0] * call.inputs.shape[1])
    from_inputs, from_states = (part.view(*call.inputs.shape[:2], -1) for part in call.added(rows))
    for one, two in zip(from_inputs, from_states, strict=True):
        if call.kind == "lstm":
            i, f, g, o = (one + two).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        elif call.kind == "gru":
            (r, z, n), (hr, hz, hn) = one.chunk(3, -1), two.chunk(3, -1)
            new, keep = (n + (r + hr).sigmoid() * hn).tanh(), (z + hz).sigmoid()
            hidden = (1 - keep) * new + keep * hidden
        else:
            hidden = (one + two).tanh()
        made.append(hidden)
    return torch.stack(made)


@pytest.mark.parametrize(("kind", "layers", "both_ways", "batch_first", "bias"), SETTINGS)
def test_cells_add_up_to_the_stack(
    kind: str, layers: int, both_ways: bool, batch_first: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    build = KINDS[kind]
    stack = build(
        3, 4, layers, bidirectional=both_ways, batch_first=batch_first, bias=bias
    ).double()
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    calls, outputs = heard(stack, x)
    expected = stack(x)
    for one, two in zip(
        torch.utils._pytree.tree_leaves(outputs),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    ):
        assert torch.allclose(one, two, rtol=0, atol=CLOSE)
    assert len(calls) == layers * (1 + both_ways)
    for call in calls:
        assert call.kind == kind
        assert call.has_bias == bias
        assert torch.allclose(stepped(call), call.states[1:], rtol=0, atol=CLOSE)
        assert not torch.allclose(stepped(call).flip(0), call.states[1:], rtol=0, atol=1e-3)


def test_cells_have_the_names_of_their_parameters() -> None:
    stack = nn.LSTM(3, 4, 2, bidirectional=True)
    calls, _ = heard(stack, torch.randn(5, 2, 3))
    assert [call.weight_hh for call in calls] == [
        f"weight_hh_l{layer}{way}" for layer in (0, 1) for way in ("", "_reverse")
    ]
    assert [call.bias_ih for call in calls][1] == "bias_ih_l0_reverse"
    assert calls[2].inputs.shape == (5, 2, 8)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_cells_told_ahead_run_with_the_weights_of_then(is_ahead: bool) -> None:
    torch.manual_seed(0)
    stack, x = nn.LSTM(3, 4, num_layers=2), torch.randn(5, 2, 3)
    as_it_was = stack(x)[0]
    told: list[Call] = []

    def double(call: Call) -> None:
        told.append(call)
        stack.state_dict()[names_of(call)[0]].mul_(2)

    outputs = run_heard(stack, (x,), double, is_ahead=is_ahead).outputs[0]
    assert [len(call.states) for call in told if isinstance(call, CellCall)] == (
        [1, 1] if is_ahead else [6, 6]
    )
    assert torch.allclose(outputs, stack(x)[0] if is_ahead else as_it_was, rtol=0, atol=1e-6)
    assert not torch.allclose(as_it_was, stack(x)[0], rtol=0, atol=1e-3)


def test_given_states_are_where_cells_start() -> None:
    stack = nn.GRU(3, 4)
    first = torch.randn(1, 2, 4)
    calls: list[Call] = []
    run_heard(
        stack,
        (
            torch.randn(5, 2, 3),
            first,
        ),
        calls.append,
    )
    (call,) = calls
    assert isinstance(call, CellCall)
    assert torch.equal(call.states[0], first[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_projections_and_packed_sequences_run_untold() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    projected = nn.LSTM(3, 4, proj_size=2)
    calls, outputs = heard(projected, x)
    assert calls == []
    assert torch.equal(outputs[0], projected(x)[0])
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    plain = nn.GRU(3, 4)
    told: list[Call] = []
    found = run_heard(plain, (packed,), told.append).outputs[0]
    assert told == []
    assert torch.equal(found.data, plain(packed)[0].data)
