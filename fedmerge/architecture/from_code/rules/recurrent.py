"""Recurrent stacks and cells as one op: rows of the weights are gates × hidden units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedmerge.architecture.from_code.labels import Axes, Fixed, Tree, concat
from fedmerge.architecture.from_code.trace import Call, Result, Rule, Stacked, Value, tensors_in

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class _Cell:
    """The tensors of one layer in one direction."""

    weight_ih: Tensor
    weight_hh: Tensor
    biases: tuple[Tensor, ...]
    projection: Tensor | None


def _tie_cell(call: Call, cell: _Cell, gates: int, inputs: Tree) -> tuple[Tree, Tree]:
    """Tie one cell's tensors; return the labels of its output state and of its cell state."""
    read, labels = call.trace.read, call.labels
    rows, columns = read(cell.weight_ih)
    own_rows, state = read(cell.weight_hh)
    labels.unify(rows, own_rows)
    labels.unify(columns, inputs)
    gate, hidden = labels.split(rows, (gates, rows.size // gates))
    labels.pin(gate, "gates")
    for bias in cell.biases:
        call.trace.use(bias, "add")
        labels.unify(read(bias)[0], rows)
    if cell.projection is None:
        labels.unify(state, hidden)
        return hidden, hidden
    projected, wide = read(cell.projection)
    labels.unify(wide, hidden)
    labels.unify(projected, state)
    return projected, hidden


def _cells(params: Sequence[Tensor], has_biases: bool, is_projected: bool) -> list[_Cell]:
    per_cell = 2 + 2 * has_biases + is_projected
    return [
        _Cell(
            cell[0],
            cell[1],
            tuple(cell[2:4]) if has_biases else (),
            cell[-1] if is_projected else None,
        )
        for cell in (params[k : k + per_cell] for k in range(0, len(params), per_cell))
    ]


def _state_of(call: Call, state: Tensor, position: int) -> Tree:
    """Return the unit axis of one cell's initial state."""
    value = call.trace.look(state)
    if value.stacked is not None and value.stacked.dim == 0:
        batch, units = value.stacked.slices[position]
        call.labels.pin(batch, "batch")
        return units
    layers, batch, units = call.trace.read(state)
    call.labels.pin(layers, "layers")
    call.labels.pin(batch, "batch")
    return units


def stack_of_cells(call: Call) -> Result:
    """Walk the layers and directions of torch.lstm, gru, rnn_tanh or rnn_relu."""
    states, is_lstm = tensors_in(call["hx"]), call.name == "lstm"
    params, directions = list(call["params"]), 1 + bool(call["bidirectional"])
    per_cell = len(params) // (call["num_layers"] * directions)
    cells = _cells(params, call["has_biases"], per_cell % 2 == 1)
    axes = call.axes("input")
    inputs, last_states, last_cells = axes[-1], [], []
    for layer in range(call["num_layers"]):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            state, hidden = _tie_cell(call, cells[k], _GATES[call.name], inputs)
            call.labels.unify(_state_of(call, states[0], k), state)
            if is_lstm:
                call.labels.unify(_state_of(call, states[1], k), hidden)
            outputs.append(state)
            last_states.append(state)
            last_cells.append(hidden)
        inputs = concat(map(call.labels.resolve, outputs))
    batch = _batch(call, axes, states)
    finals = [_final(call, batch, trees) for trees in (last_states, last_cells)]
    return [(*axes[:-1], inputs), *finals[: len(states)]]


def _batch(call: Call, axes: Axes, states: Sequence[Tensor]) -> Tree:
    """Tie the batch axes, if the sequences are not packed."""
    if len(axes) < 3:
        for axis in axes[:-1]:
            call.labels.pin(axis, "packed steps")
        return Fixed(states[0].shape[1], "batch")
    time, batch = (1, 0) if call["batch_first"] else (0, 1)
    call.labels.pin(axes[time], "steps")
    call.labels.pin(axes[batch], "batch")
    return axes[batch]


def _final(call: Call, batch: Tree, trees: Sequence[Tree]) -> Value:
    """Return the last states as a stack over layers and directions."""
    axes = (Fixed(len(trees), "layers"), batch, call.labels.fresh(trees[0].size))
    return Value(axes, Stacked(0, tuple((batch, tree) for tree in trees)))


def single_cell(call: Call) -> Result:
    """Walk one step of an LSTM, GRU or RNN cell."""
    kind = call.name.removesuffix("_cell")
    states = tensors_in(call["hx"])
    biases = tuple(call[k] for k in ("b_ih", "b_hh") if call.tensor(k) is not None)
    cell = _Cell(call["w_ih"], call["w_hh"], biases, None)
    axes = call.axes("input")
    state, _ = _tie_cell(call, cell, _GATES[kind], axes[-1])
    for tensor in states:
        given = call.trace.read(tensor)
        call.labels.unify(given[-1], state)
        for own, batch in zip(given[:-1], axes[:-1], strict=True):
            call.labels.unify(own, batch)
    return [(*axes[:-1], state) for _ in call.outputs]


def pack(call: Call) -> Result:
    """Put the steps of padded sequences one after another."""
    axes = call.axes()
    for axis in axes[:2]:
        call.labels.pin(axis, "steps")
    return [(Fixed(call.shape[0], "steps"), *axes[2:]), (Fixed(call.outputs[1].shape[0]),)]


def unpack(call: Call) -> Result:
    """Undo `pack`, with padding."""
    axes = call.axes()
    call.labels.pin(axes[0], "steps")
    steps = tuple(Fixed(size, "steps") for size in call.shape[:2])
    return [(*steps, *axes[1:]), (Fixed(call.outputs[1].shape[0]),)]


RECURRENT_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_GATES, stack_of_cells),
    **dict.fromkeys((f"{kind}_cell" for kind in _GATES), single_cell),
    "_pack_padded_sequence": pack,
    "_pad_packed_sequence": unpack,
}
