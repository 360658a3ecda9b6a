"""Check a plan by numbers: permuting every group must leave the outputs unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError, UntoldError
from fedmerge.graph.model.modules import StatePairs, copied, float_tensors
from fedmerge.graph.model.values import (
    TOLERANCE,
    cast_inputs,
    differ,
    generic_model,
    is_telling,
    lowest_precision,
    run,
)
from fedmerge.graph.widths import solve_widths
from fedmerge.types.arrays import IntArray
from fedmerge.types.layouts import index_map, outer_groups
from fedmerge.types.plans import Plan, pin_groups

_DRAWS = 5  # how often values are drawn until the outputs are finite and not all zero
WHY_PINNED = "permuting it changes the outputs"
_HINT = "pin these groups in a plan of your own (`fedmerge plan -o`, then --plan)"


def verify_plan(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[Any, ...],
    *,
    rng: np.random.Generator,
    state: StatePairs = (),
    widths: Mapping[str, int] | None = None,
) -> None:
    """Raise ArchitectureError unless permuting all groups at once leaves the outputs unchanged.

    Generic random values in all tensors, double precision at 1e-9 (single at 1e-4 if the model
    asks for it), two forwards; on failure the groups are tried one by one. `widths` are those of
    the groups in the model (default: from its shapes).
    """
    guilty = _guilty_groups(model, plan, inputs, rng=rng, state=state, widths=widths)
    if guilty:
        named = ", ".join(f"'{group}'" for group in guilty)
        raise ArchitectureError(
            f"the plan does not fit the model: permuting {named} changes its outputs", _HINT
        )


def pin_misfits(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[Any, ...],
    *,
    rng: np.random.Generator,
    state: StatePairs = (),
) -> Plan:
    """Return a plan that is verified; groups around others (heads) that fail are pinned in it.

    A note names them. Where other groups fail too, the plan is refused.
    """
    guilty = _guilty_groups(model, plan, inputs, rng=rng, state=state)
    if not guilty:
        return plan
    shapes = {name: tuple(t.shape) for name, t in float_tensors(model)[0].items()}
    widths = solve_widths(plan, shapes, source="the model")
    heads = {g for t in plan.tensors.values() for axis in t.axes for g in outer_groups(axis)}
    outer = {group: widths[group] for group in guilty if group in heads}
    notes = (f"'{group}' is pinned: {WHY_PINNED}" for group in outer)
    pinned = replace(pin_groups(plan, outer, WHY_PINNED), notes=(*plan.notes, *notes))
    verify_plan(model, pinned, inputs, rng=rng, state=state)
    return pinned


def _guilty_groups(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[Any, ...],
    *,
    rng: np.random.Generator,
    state: StatePairs,
    widths: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the groups whose permutation changes the outputs, all if only together they do."""
    if not plan.groups:
        return []
    dtype = lowest_precision(model, inputs, state=state)
    arguments = cast_inputs(inputs, dtype)
    module, expected = _telling_model(model, arguments, dtype, state, rng)
    shapes = {name: tuple(t.shape) for name, t in float_tensors(module)[0].items()}
    widths = widths or solve_widths(plan, shapes, source="the model")
    moves = {group: _moved(width, rng) for group, width in widths.items()}

    def fails(groups: Mapping[str, IntArray]) -> bool:
        still = {group: np.arange(width) for group, width in widths.items()}
        changed = permuted(module, plan, {**still, **groups}, widths)
        return differ(expected, run(changed, arguments, state=state), TOLERANCE[dtype])

    if not fails(moves):
        return []
    return [group for group, move in moves.items() if fails({group: move})] or list(moves)


def permuted(
    module: nn.Module, plan: Plan, moves: Mapping[str, IntArray], widths: Mapping[str, int]
) -> nn.Module:
    """Return a copy of a module with unit u of every group moved to `moves[group][u]`."""
    result = copied(module)
    tensors = float_tensors(result)[0]
    for name, planned in plan.tensors.items():
        values: Tensor = tensors[name].detach()
        for axis, layout in enumerate(planned.axes):
            targets = torch.from_numpy(index_map(layout, moves, widths))
            values = torch.empty_like(values).index_copy_(axis, targets, values)
        with torch.no_grad():
            tensors[name].copy_(values)
    return result


def _moved(width: int, rng: np.random.Generator) -> IntArray:
    """Return a random permutation (width,) that is not the identity."""
    while True:
        move = rng.permutation(width)
        if width < 2 or not np.array_equal(move, np.arange(width)):
            return move


def _telling_model(
    model: nn.Module,
    inputs: tuple[Any, ...],
    dtype: torch.dtype,
    state: StatePairs,
    rng: np.random.Generator,
) -> tuple[nn.Module, list[Tensor]]:
    """Return a model with generic values, and its outputs, which must say something."""
    for _ in range(_DRAWS):
        module = generic_model(model, dtype, rng=rng)
        outputs = run(module, inputs, state=state)
        if is_telling(outputs):
            break
    else:
        raise UntoldError(
            "the plan cannot be verified: on random values the outputs are zero or not finite",
            "give inputs that the model is made for with --input-shape and --input-dtype",
        )
    if differ(outputs, run(module, inputs, state=state), TOLERANCE[dtype]):
        raise ArchitectureError(
            "the model gives other outputs each time it runs, even in evaluation mode",
            "turn off what is random in it",
        )
    return module, outputs
