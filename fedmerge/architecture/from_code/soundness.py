"""Whether a plan is right: permute every group, grow it, and compare outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code.branches import Ran, run_forward
from fedmerge.architecture.from_code.dispatch import EagerMode, plain_kernels
from fedmerge.architecture.from_code.modules import (
    StatePairs,
    copied,
    float_tensors,
    plain_numbers,
    tensor_leaves,
)
from fedmerge.architecture.widths import solve_widths
from fedmerge.errors import ArchitectureError, UntoldError, UserCodeError
from fedmerge.private_torch import leaves, map_tensors
from fedmerge.values.arrays import IntArray
from fedmerge.values.nesting import with_inside
from fedmerge.values.plans import (
    Plan,
    groups_in,
    index_map,
    outer_groups,
    pin_groups,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest output
MOST_DOUBLES = 1 << 25  # numbers of a model that is tried in double precision (256 MB)


def generic_model(model: nn.Module, dtype: torch.dtype, *, rng: np.random.Generator) -> nn.Module:
    """Return a copy with random values in every parameter and buffer.

    Default values hide mistakes (zero biases, unit variances). What is positive everywhere stays
    positive: variances, scales.
    """
    module = copied(model).to(dtype)
    for name, tensor in float_tensors(module)[0].items():
        drawn = rng.standard_normal(tuple(tensor.shape))
        fan = max(1, tensor.numel() // max(tensor.shape)) if tensor.dim() > 1 else 1
        is_positive = tensor.numel() and bool((tensor > 0).all())
        is_positive = is_positive and (name.endswith("running_var") or tensor.dim() < 2)
        values = 0.5 + np.abs(drawn) if is_positive else drawn / np.sqrt(min(fan, 64))
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.asarray(values)))
    return module


def cast_inputs(inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the inputs with float tensors in the given precision."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)

    result: tuple[Any, ...] = map_tensors(cast, inputs)
    return result


class _Precision(EagerMode):  # type: ignore[no-untyped-call]
    """Note whether any op gives less than double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.is_low = False

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Look at an op's results."""
        for tensor in leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim():
                self.is_low |= tensor.dtype != torch.float64
        return result


def lowest_precision(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    state: StatePairs = (),
    most_doubles: float = MOST_DOUBLES,
) -> torch.dtype:
    """Return float64 if the model can run in it from end to end, else float32.

    The latter for large models, too, which would take twice the memory and time.
    """
    if sum(tensor.numel() for tensor in float_tensors(model)[0].values()) > most_doubles:
        return torch.float32
    module = copied(model).to(torch.float64)  # before the mode looks: its own tensors are single
    arguments = cast_inputs(inputs, torch.float64)
    try:
        with _Precision() as seen:
            run(module, arguments, state=state)
    except UserCodeError:
        return torch.float32
    return torch.float32 if seen.is_low else torch.float64


def run(module: nn.Module, inputs: tuple[Any, ...], *, state: StatePairs = ()) -> list[Tensor]:
    """Return all outputs of a model; a carried state starts constant and goes back in once."""
    dtype = next((t.dtype for t in float_tensors(module)[0].values()), torch.float64)
    with torch.no_grad(), _default_dtype(dtype), plain_kernels():
        arguments = list(map_tensors(torch.clone, inputs))
        for i, _ in state:
            arguments[i] = map_tensors(lambda t: torch.full_like(t, 0.25), arguments[i])
        ran = run_forward(module, arguments)
        results = [*_visible(ran.outputs, state), *_decided(ran)]
        for i, j in state:
            arguments[i] = ran.outputs[j]
        if state:
            ran = run_forward(module, arguments)
            results += [*_visible(ran.outputs, state), *_decided(ran)]
    return [plain_numbers(tensor).detach() for tensor in results]


def _decided(ran: Ran) -> list[Tensor]:
    """Return what a model would decide by itself where it is told: that must not change, either."""
    return [torch.tensor(ran.truths)] if ran.truths else []


def _visible(outputs: Any, state: StatePairs) -> list[Tensor]:
    hidden = {j for _, j in state}
    if not hidden:
        return tensor_leaves(outputs)
    return [t for j, out in enumerate(outputs) if j not in hidden for t in tensor_leaves(out)]


def differ(before: Sequence[Tensor], after: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether two lists of outputs differ by more than rounding."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return True
    for one, other in zip(before, after, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return True
            continue
        scale = one.abs().max().item() if one.numel() else 0.0
        gap = (one - other).abs().max().item() if one.numel() else 0.0
        if not gap <= tolerance * scale:
            return True
    return False


def is_telling(outputs: Sequence[Tensor]) -> bool:
    """Return whether outputs are finite and not all zero, so that a comparison says something."""
    floats = [t for t in outputs if t.is_floating_point() and t.numel()] or list(outputs)
    return all(bool(t.isfinite().all()) for t in floats) and any(bool(t.any()) for t in floats)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of the model's own code as precise as the model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_DRAWS = 5  # how often values are drawn until the outputs are finite and not all zero
WHY_PINNED = "permuting it changes the outputs"
_HINT = "pin these groups in a plan of your own (`fedmerge plan -o`, then `plan`)"


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

    A note names them. Before, units inside others that fail with an order of their own in each get
    one order for all. Where other groups fail too, the plan is refused.
    """
    guilty = _guilty_groups(model, plan, inputs, rng=rng, state=state)
    if set(guilty) & plan.inside.keys():
        own = {group: outer for group, outer in plan.inside.items() if group not in guilty}
        plan = with_inside(plan, own)
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
    """Return the groups whose permutation changes the outputs, all if only together they do.

    What single precision says of a large model, to save time, is tried again in double.
    """
    if not plan.groups:
        return []
    test = partial(_guilty_in, model, plan, inputs, rng=rng, state=state, widths=widths)
    dtype = lowest_precision(model, inputs, state=state)
    guilty = test(dtype)
    if guilty and dtype == torch.float32:
        dtype = lowest_precision(model, inputs, state=state, most_doubles=math.inf)
        guilty = guilty if dtype == torch.float32 else test(dtype)
    return guilty


def _guilty_in(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[Any, ...],
    dtype: torch.dtype,
    *,
    rng: np.random.Generator,
    state: StatePairs,
    widths: Mapping[str, int] | None,
) -> list[str]:
    """Return these groups, seen in some precision."""
    arguments = cast_inputs(inputs, dtype)
    module, expected = _telling_model(model, arguments, dtype, state, rng)
    tolerance = TOLERANCE[dtype]
    shapes = {name: tuple(t.shape) for name, t in float_tensors(module)[0].items()}
    widths = widths or solve_widths(plan, shapes, source="the model")
    moves = random_moves(plan, widths, rng)

    def fails(groups: Mapping[str, IntArray]) -> bool:
        still = {group: np.arange(width) for group, width in widths.items()}
        with _moved_in_place(module, plan, {**still, **groups}, widths):
            return differ(expected, run(module, arguments, state=state), tolerance)

    if not fails(moves):
        return []
    if differ(expected, run(module, arguments, state=state), tolerance):
        raise ArchitectureError(
            "the model gives other outputs each time it runs, even in evaluation mode",
            "turn off what is random in it",
        )
    return [group for group, move in moves.items() if fails({group: move})] or list(moves)


def permuted(
    module: nn.Module, plan: Plan, moves: Mapping[str, IntArray], widths: Mapping[str, int]
) -> nn.Module:
    """Return a copy of a module with unit u of every group moved to `moves[group][u]`."""
    result = copied(module)
    for values, axis, places in _places(result, plan, moves, widths):
        values.copy_(torch.empty_like(values).index_copy_(axis, places, values))
    return result


def random_moves(
    plan: Plan, widths: Mapping[str, int], rng: np.random.Generator
) -> dict[str, IntArray]:
    """Return a random order of every group's units, another one in every unit around them."""

    def moves(group: str) -> IntArray:
        outer = plan.inside.get(group)
        if outer is None:
            return _moved(widths[group], rng)
        return np.stack([_moved(widths[group], rng) for _ in range(widths[outer])])

    return {group: moves(group) for group in widths}


@contextmanager
def _moved_in_place(
    module: nn.Module, plan: Plan, moves: Mapping[str, IntArray], widths: Mapping[str, int]
) -> Iterator[None]:
    """Move units for a while in a module itself, which takes no memory."""
    moved = list(_places(module, plan, moves, widths))
    for values, axis, places in moved:
        values.copy_(torch.empty_like(values).index_copy_(axis, places, values))
    try:
        yield
    finally:
        for values, axis, places in moved:
            values.copy_(values.index_select(axis, places))


def _places(
    module: nn.Module, plan: Plan, moves: Mapping[str, IntArray], widths: Mapping[str, int]
) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield tensors with an axis along which they have units, and the units' new places."""
    tensors = float_tensors(module)[0]
    for name, planned in plan.tensors.items():
        for axis, layout in enumerate(planned.axes):
            if any(groups_in(layout)):
                places = torch.from_numpy(index_map(layout, moves, widths))
                yield tensors[name].detach(), axis, places


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
            "give inputs that the model is made for with `input_shape` and `input_dtype`",
        )
    return module, outputs
