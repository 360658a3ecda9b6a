"""Recurrent layers, run one by one: what each cell reads, and its states step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = str  # lstm, gru, rnn_tanh or rnn_relu
NameOf: TypeAlias = Callable[[Tensor | None], str | None]
GATES: Mapping[Kind, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class CellCall:
    """One layer and direction of a recurrent stack in a run, time first, in its own order.

    `inputs` (steps, samples, in), `states` (steps + 1, samples, hidden) with the initial one.
    """

    kind: Kind
    weight_ih: str
    weight_hh: str
    bias_ih: str | None
    bias_hh: str | None
    inputs: Tensor
    states: Tensor
    parameters: tuple[Tensor, ...]  # weight_ih (gates × hidden, in), weight_hh, the biases if any

    @property
    def has_bias(self) -> bool:
        """Whether parameters are added to the gates."""
        return self.bias_ih is not None

    @property
    def reads(self) -> int:
        """How many numbers one gate is a sum over."""
        return self.inputs.shape[-1] + self.states.shape[-1]

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (rows, in) and the states before (rows, hidden) of some steps × samples."""
        before = self.states[:-1]
        return self.inputs.flatten(0, 1)[rows], before.flatten(0, 1)[rows]

    def added(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what inputs and states add to the gates (rows, gates × hidden), with biases."""
        inputs, states = self.rows(rows)
        weight_ih, weight_hh, *biases = self.parameters
        bias_ih, bias_hh = biases or (0.0, 0.0)
        return inputs @ weight_ih.T + bias_ih, states @ weight_hh.T + bias_hh


@dataclass(frozen=True)
class StackRun:
    """What a stack of cells returned, and every cell's call."""

    result: tuple[Tensor, ...]
    calls: tuple[CellCall, ...]


def run_stack(name: str, args: Sequence[Any], name_of: NameOf) -> StackRun | None:
    """Run `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` layer by layer, if it is such a call.

    None for other functions, packed sequences, projections and weights that are no parameters.
    """
    if name not in GATES or len(args) < 9 or not isinstance(args[3], bool):
        return None
    inputs, hx, params, has_biases, layers, _, _, is_both_ways, is_batch_first = args[:9]
    states = list(hx) if isinstance(hx, tuple | list) else [hx]
    directions = 1 + bool(is_both_ways)
    per_cell = 2 + 2 * bool(has_biases)
    if len(params) != layers * directions * per_cell or any(name_of(p) is None for p in params):
        return None
    function = getattr(torch, name)
    values = inputs.transpose(0, 1) if is_batch_first and inputs.dim() == 3 else inputs
    calls: list[CellCall] = []
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            own = params[k * per_cell : (k + 1) * per_cell]
            steps = values.flip(0) if k % directions else values
            first = [state[k : k + 1] for state in states]
            given = tuple(first) if name == "lstm" else first[0]
            made, *last = function(steps, given, own, has_biases, 1, 0.0, False, False, False)
            finals.append(tuple(last))
            calls.append(_call(name, own, name_of, steps, torch.cat([first[0], made])))
            outputs.append(made.flip(0) if k % directions else made)
        values = torch.cat(outputs, dim=-1)
    last_states = [torch.cat(parts) for parts in zip(*finals, strict=True)]
    result = values.transpose(0, 1) if is_batch_first and inputs.dim() == 3 else values
    return StackRun((result, *last_states), tuple(calls))


def _call(
    kind: Kind, own: Sequence[Tensor], name_of: NameOf, inputs: Tensor, states: Tensor
) -> CellCall:
    weight_ih, weight_hh, bias_ih, bias_hh = [*map(name_of, own), None, None][:4]
    assert weight_ih is not None
    assert weight_hh is not None
    return CellCall(
        kind, weight_ih, weight_hh, bias_ih, bias_hh, inputs, states, tuple(p.detach() for p in own)
    )
