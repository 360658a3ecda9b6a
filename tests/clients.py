"""Clients for tests: permuted copies of a model, spoilt units, and merged models that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture import ChainOptions, plan_chain, resize_module, solve_widths
from fedmerge.checkpoint import from_state_dict
from fedmerge.values import IntArray, Plan, axis_size, index_map, unit_positions
from tests.zoo import Entry

State = Mapping[str, Tensor]


def plan_of(state: State) -> tuple[Plan, dict[str, int]]:
    """Return a state dict's plan and widths."""
    client = from_state_dict(state, name="model")
    plan = plan_chain(client.tensors, ChainOptions(), aliases=client.aliases, source="model")
    shapes = {name: info.shape for name, info in client.tensors.items()}
    return plan, solve_widths(plan, shapes, source="model")


def permuted(state: State, seed: int) -> tuple[dict[str, Tensor], dict[str, IntArray]]:
    """Return the state with every group's units in random order, and where each unit went."""
    plan, widths = plan_of(state)
    rng = np.random.default_rng(seed)
    moves = {group: rng.permutation(width) for group, width in widths.items()}
    result = {name: tensor.clone() for name, tensor in state.items()}
    for name, planned in plan.tensors.items():
        for axis, layout in enumerate(planned.axes):
            targets = torch.from_numpy(index_map(layout, moves, widths))
            moved = torch.empty_like(result[name])
            moved.index_copy_(axis, targets, result[name])
            result[name] = moved
    return _tied_as(state, result), moves


def spoil_units(state: State, seed: int) -> dict[str, Tensor]:
    """Return the state with a zero unit and two equal units in every group of four or more."""
    plan, widths = plan_of(state)
    result = {name: tensor.clone() for name, tensor in state.items()}
    for group, width in widths.items():
        if width < 4:
            continue
        zero, first, second = np.random.default_rng(seed).permutation(width)[:3]
        for name, planned in plan.tensors.items():
            if group not in planned.produces or planned.role == "pointwise":
                continue
            positions = unit_positions(planned.axes[planned.out], group, widths)
            rows = result[name].movedim(planned.out, 0)
            rows[torch.from_numpy(positions[zero])] = 0.0
            rows[torch.from_numpy(positions[second])] = rows[torch.from_numpy(positions[first])]
    return _tied_as(state, result)


def noisy(state: State, scale: float, seed: int) -> dict[str, Tensor]:
    """Return the state with a little noise on every weight."""
    generator = torch.Generator().manual_seed(seed)
    result = {
        name: t + scale * t.std() * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        if t.is_floating_point() and t.numel() > 1 and "running" not in name
        else t
        for name, t in state.items()
    }
    return _tied_as(state, result)


def loaded(entry: Entry, state: State) -> nn.Module:
    """Return the zoo's model at the widths of a state dict, with its values."""
    model = entry.build().double().eval()
    resize_module(model, {name: tuple(tensor.shape) for name, tensor in state.items()})
    model.load_state_dict(dict(state))
    return model


def clients_of(entry: Entry, count: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a model and permuted copies of its state, the first one in its own order."""
    model = entry.fresh(seed=1)
    state = model.state_dict()
    return model, [state, *(permuted(state, seed)[0] for seed in range(1, count))]


def _tied_as(state: State, result: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the result with the same ties as the state."""
    aliases = from_state_dict(state, name="model").aliases
    return {name: result[aliases.get(name, name)] for name in result}


def relative_moves(
    assignments: Sequence[IntArray], moves: Sequence[Mapping[str, IntArray]], group: str
) -> list[IntArray]:
    """Return each client's assignment seen from the units of the original model."""
    return [
        assigned[move[group]] if group in move else assigned
        for assigned, move in zip(assignments, moves, strict=True)
    ]


def widened(state: State, extra: int, seed: int) -> dict[str, Tensor]:
    """Return a wider net of the same function: every group has more units that nothing reads."""
    plan, widths = plan_of(state)
    wide = {group: width + extra for group, width in widths.items()}
    same = {group: np.arange(width) for group, width in widths.items()}
    generator = torch.Generator().manual_seed(seed)
    result = {name: tensor.clone() for name, tensor in state.items()}
    for name, planned in plan.tensors.items():
        maps = [torch.from_numpy(index_map(axis, same, wide)) for axis in planned.axes]
        shape = [axis_size(axis, wide) for axis in planned.axes]
        values = torch.rand(shape, generator=generator, dtype=state[name].dtype) + 0.5
        old_rows = torch.zeros(shape[planned.out], dtype=torch.bool)
        old_rows[maps[planned.out]] = True
        values.movedim(planned.out, 0)[old_rows] = 0.0
        values[torch.meshgrid(*maps, indexing="ij")] = state[name]
        result[name] = values
    return _tied_as(state, result)
