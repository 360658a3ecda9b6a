"""Plans of recurrent layers: which axes of their weights carry inputs, gates and states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedmerge.architecture.layers import (
    MODEL_HINT,
    Layer,
    recurrent_levels,
)
from fedmerge.errors import ArchitectureError
from fedmerge.values.plans import (
    Concat,
    Layout,
    Pinned,
    Product,
    TensorPlan,
    Units,
    axis_size,
)


@dataclass(frozen=True)
class Stack:
    """A planned stack of recurrent layers."""

    tensors: Mapping[str, TensorPlan]
    widths: Mapping[str, int]  # its groups, bottom layer first
    ties: tuple[tuple[str, ...], ...]  # groups that must stay equally wide
    output: Layout  # what its last layer gives


@dataclass(frozen=True)
class _Cell:
    """One layer of one direction."""

    tensors: Mapping[str, TensorPlan]
    hidden: str
    width: int
    projection: str | None
    state_width: int

    @property
    def state(self) -> str:
        """The group of what it gives."""
        return self.projection or self.hidden

    @property
    def widths(self) -> dict[str, int]:
        """The widths of its groups."""
        return {self.hidden: self.width, self.state: self.state_width}


def plan_recurrent(layer: Layer, reading: Layout, width: int) -> Stack:
    """Return the plan of a recurrent layer that reads a layout `width` wide."""
    cells: list[_Cell] = []
    for ends in recurrent_levels(layer):
        level = []
        for end in ends:
            columns = layer.shape(f"weight_ih{end}")[1]
            if columns != width:
                raise ArchitectureError(
                    f"'{layer.name('weight_ih' + end)}' reads {columns} values, expected {width}",
                    MODEL_HINT,
                )
            level.append(_plan_cell(layer, end, reading))
        states = tuple(Units(cell.state) for cell in level)
        reading = states[0] if len(states) == 1 else Concat(states)
        cells += level
        width = axis_size(reading, {cell.state: cell.state_width for cell in level})
    hidden = tuple(cell.hidden for cell in cells)
    projections = tuple(cell.projection for cell in cells if cell.projection)
    return Stack(
        tensors={name: tensor for cell in cells for name, tensor in cell.tensors.items()},
        widths={group: units for cell in cells for group, units in cell.widths.items()},
        ties=tuple(tie for tie in (hidden, projections) if len(tie) > 1),
        output=reading,
    )


def _plan_cell(layer: Layer, end: str, reading: Layout) -> _Cell:
    """Plan one layer of one direction, whose tensors' names end in `end`."""
    rows = layer.shape(f"weight_ih{end}")[0]
    state_width = layer.shape(f"weight_hh{end}")[1]
    projects = f"weight_hr{end}" in layer.tensors
    width = layer.shape(f"weight_hr{end}")[1] if projects else state_width
    gates = _gates(layer, rows, width)
    name = f"{layer.prefix}{end}" if layer.prefix else end.lstrip("_")
    projection = f"{name}.projection" if projects else None
    units, state = Units(name), Units(projection or name)
    produced = Product((Pinned(gates), units)) if gates > 1 else units
    planned = {
        "weight_ih": TensorPlan((produced, reading)),
        "weight_hh": TensorPlan((produced, state), role="recurrent"),
        "bias_ih": TensorPlan((produced,)),
        "bias_hh": TensorPlan((produced,), role="recurrent"),
        "weight_hr": TensorPlan((state, units)),
    }
    tensors = {
        layer.name(leaf + end): tensor
        for leaf, tensor in planned.items()
        if leaf + end in layer.tensors
    }
    return _Cell(tensors, name, width, projection, state_width)


def _gates(layer: Layer, rows: int, width: int) -> int:
    gates, rest = divmod(rows, width)
    if rest or gates not in (1, 3, 4):
        raise ArchitectureError(
            f"'{layer.prefix}' has {rows} rows for {width} hidden units, "
            "expected 1 (RNN), 3 (GRU) or 4 (LSTM) per unit",
            MODEL_HINT,
        )
    return gates
